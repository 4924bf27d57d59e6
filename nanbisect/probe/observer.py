"""What happened in the step under way, judged before anything can smear it, and written down.

A step (window) is everything from one optimizer step to the next. Ranges of losses and gradients are
kept on the device and read at the first of: clipping, unscaling, the optimizer, the next training
forward without gradients, exit. Parameters, buffers and optimizer state are read after the step,
together with the norm that clipping returned.
"""

from __future__ import annotations

import math
import resource
import sys
import time
import weakref
from collections import namedtuple

import torch

from . import numbers
from .graph import Walk
from .journal import rank
from .names import Names, dropout_active

Flag = namedtuple("Flag", "micro tensor use ends")
Loss = namedtuple("Loss", "micro handed unscaled")

FIRST_BAD = 16  # tensors listed in an event
EVENTS = 4  # non-finite events written; the first is the one that counts
SEARCHES = 3  # walks over all objects alive, to find a module that training never calls
STATE_EVERY = 5  # steps between looks at the optimizer's state, after the first three


class Window:
    """The step under way."""

    def __init__(self):
        self.flags = []
        self.losses = []
        self.micro = -1
        self.nested = 0
        self.recomputed = 0
        self.kernels = {}
        self.judged = False
        self.bad = []
        self.loss_values = []
        self.norm = None
        self.clip = None
        self.after_clip = None
        self.norms = None
        self.scale = None
        self.deferred = None  # an event that the GradScaler may absorb
        self.began = time.perf_counter()


class Clock:
    """The probe's own seconds: work inside work counts once."""

    def __init__(self):
        self.depth = 0
        self.since = 0.0
        self.seconds = 0.0

    def __enter__(self):
        if self.depth == 0:
            self.since = time.perf_counter()
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1
        if self.depth == 0:
            self.seconds += time.perf_counter() - self.since

    def take(self):
        """Seconds since the last take, the running work included."""
        now = time.perf_counter()
        taken, self.seconds = self.seconds + (now - self.since if self.depth else 0.0), 0.0
        self.since = now
        return taken


class Observer:
    """Takes what the patches see; writes events. One a process."""

    def __init__(self, journal):
        self.journal = journal
        self.names = Names()
        self.roots = weakref.WeakSet()
        self.hooked = {}
        self.window = Window()
        self.step = 1
        self.events = 0
        self.scaled = {}
        self.scaler = None
        self.checked = False
        self.infinite_buffers = set()
        self.optimizers = weakref.WeakSet()
        self.plain_register = torch.Tensor.register_post_accumulate_grad_hook
        self.guarded_arrived = self.arrived
        self.searches = 0
        self.frees_gradients = False
        self.clock = Clock()

    @property
    def found(self):
        """Whether a non-finite value has surfaced."""
        return self.events > 0

    # forward -----------------------------------------------------------------------------------

    def forward(self, module):
        """A training forward of a root module is about to start."""
        if module not in self.roots and any(p.requires_grad for p in module.parameters()):
            self.roots.add(module)
            self.names.learn(module)
            self._describe(module)
            self._check_loaded()
        flags = () if self.frees_gradients else self.window.flags
        if flags and all(flag.tensor() is None or flag.tensor().grad is None for flag in flags):
            self.end("dropped")

    def _describe(self, module):
        dtypes = {}
        for parameter in module.parameters():
            key = str(parameter.dtype).replace("torch.", "")
            dtypes[key] = dtypes.get(key, 0) + 1
        parameters = list(module.parameters())
        self.journal.write(
            "root",
            module=type(module).__name__,
            parameters=len(parameters),
            elements=sum(parameter.numel() for parameter in parameters),
            dtypes=dtypes,
            device=str(parameters[0].device),
            dropout=dropout_active(module),
            tied=[[name, *others] for name, others in self.names.tied.items()],
        )

    def _check_loaded(self):
        """Parameters and buffers before the first step. An Inf in a buffer is usually an intended mask."""
        bad = self._bad_of(self.names.live(self.names.parameters))
        for entry in self._bad_of(self.names.live(self.names.buffers)):
            if entry["value"] == "nan":
                bad.append(entry)
            else:
                self.infinite_buffers.add(entry["name"])
                text = "buffer %s holds %s after loading" % (entry["name"], entry["value"])
                self._repair("infinite_buffer", text, [entry["name"]])
        if bad and self.step == 1:
            self._event("load", bad[0]["value"], bad, 0, len(self.names.parameters) + len(self.names.buffers))

    def _bad_of(self, pairs):
        """Non-finite ones of (name, tensor) pairs, with counts; one transfer for all."""
        flags = [(name, tensor, numbers.ends(tensor)) for name, tensor in pairs]
        flags = [flag for flag in flags if flag[2] is not None]
        bad = []
        for (name, tensor, _), (low, high) in zip(flags, numbers.read([flag[2] for flag in flags])):
            value = numbers.kind(low, high)
            if value is not None:
                bad.append({"name": name, "value": value, **numbers.counts(tensor)})
        return bad

    # backward ----------------------------------------------------------------------------------

    def backward(self, tensors, nested):
        """A backward call is about to run: hook its leaves, note its loss, kernels and tied weights."""
        window = self.window
        roots = [t for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        if nested:
            window.nested += 1
        else:
            self._self_check(roots)
            window = self.window
            window.micro += 1
        walk = Walk(roots)
        for name, count in walk.kernels.items():
            window.kernels[name] = window.kernels.get(name, 0) + count
        if not nested:
            self._note_losses(roots)
            leaves = walk.leaves.values()
            self._learn_by_search([leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)])
        for key, leaf in walk.leaves.items():
            self.hook(leaf)
            if len(walk.uses[key]) > 1:
                self._hook_uses(leaf, walk)

    def _learn_by_search(self, leaves):
        """Training may call only parts of the model: find the module that holds all leaves, a few times at most."""
        if self.names.knows(leaves) or self.searches == SEARCHES:
            return
        self.searches += 1
        module = self.names.search(leaves)
        if module is not None and module not in self.roots:
            self.roots.add(module)
            self._describe(module)
            self._check_loaded()

    def _note_losses(self, roots):
        for root in roots:
            if root.numel() == 1:
                unscaled = self.scaled.pop(id(root), None)
                self.window.losses.append(Loss(self.window.micro, root.detach().clone(), unscaled))

    def hook(self, leaf):
        """Look at this leaf's gradient whenever it is accumulated; ours is the first hook of all."""
        known = self.hooked.get(id(leaf))
        if known is not None and known() is leaf:
            return
        self.hooked[id(leaf)] = weakref.ref(leaf)
        self.plain_register(leaf, self.guarded_arrived)

    def arrived(self, leaf):
        """A gradient was accumulated into `leaf`."""
        if leaf.grad is not None:
            ends = numbers.ends(leaf.grad)
            if ends is not None:
                self.window.flags.append(Flag(self.window.micro, weakref.ref(leaf), None, ends))

    def _hook_uses(self, leaf, walk):
        """Each use of a tied weight by itself: the sum in `.grad` can't be told apart afterwards."""
        window, reference = self.window, weakref.ref(leaf)
        for node, index in walk.uses[id(leaf)]:

            def look(grad_inputs, _, index=index, use=walk.use_name(node), micro=window.micro):
                ends = numbers.ends(grad_inputs[index]) if grad_inputs[index] is not None else None
                if ends is not None:
                    window.flags.append(Flag(micro, reference, use, ends))

            node.register_hook(look)

    def _self_check(self, roots):
        """Plant a NaN once, through the same backward, hook and reading as real gradients."""
        if self.checked or not roots:
            return
        self.checked = True
        kept, self.window = self.window, Window()
        with torch.enable_grad():
            scratch = torch.ones(2, device=roots[0].device, requires_grad=True)
            planted = (scratch * scratch.new_tensor([1.0, math.nan])).sum()
        torch.autograd.backward(planted)
        values = numbers.read([flag.ends for flag in self.window.flags])
        seen = any(numbers.kind(low, high) == "nan" for low, high in values)
        self.window = kept
        self.journal.write("self_check", seen=seen, device=str(scratch.device))

    # judging -----------------------------------------------------------------------------------

    def judge(self):
        """Read losses and gradients of this step, once; called before anything can change them."""
        window = self.window
        if window.judged or not (window.flags or window.losses):
            return
        window.judged = True
        losses = [loss.handed if loss.unscaled is None else loss.unscaled for loss in window.losses]
        handed = [loss.handed for loss in window.losses]
        pairs = [flag.ends for flag in window.flags] + [numbers.ends(loss) for loss in losses + handed]
        values = numbers.read(pairs)
        gradients, rest = values[: len(window.flags)], values[len(window.flags) :]
        window.loss_values = list(zip(window.losses, rest[: len(losses)], rest[len(losses) :]))
        window.bad = self._bad_gradients(gradients)
        if self.step == 1:
            window.norms = self._gradient_norms()
        self._surfaced()

    def _bad_gradients(self, values):
        uses, bad = {}, []
        for flag, (low, high) in zip(self.window.flags, values):
            value = numbers.kind(low, high)
            tensor = flag.tensor()
            if value is None or tensor is None:
                continue
            name = self.names.name(tensor)
            if flag.use is not None:
                uses.setdefault((flag.micro, name), []).append(flag.use)
                continue
            entry = {"name": name, "value": value, "micro_batch": flag.micro, "uses": uses.get((flag.micro, name), [])}
            counted = tensor.grad is not None and len(bad) < FIRST_BAD
            bad.append({**entry, **numbers.counts(tensor.grad)} if counted else entry)
        return bad

    def _gradient_norms(self):
        """L2 norm of every named gradient, in float32, at the first step only."""
        pairs = [(name, p.grad) for name, p in self.names.live(self.names.parameters) if p.grad is not None]
        pairs = [(name, numbers.local(grad)) for name, grad in pairs]
        pairs = [(name, grad) for name, grad in pairs if grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for _, grad in pairs]
        return {name: float(norm) for (name, _), norm in zip(pairs, norms)}

    def _surfaced(self):
        """The first non-finite value of this step: the loss of a micro-batch stands before its gradients."""
        window = self.window
        losses = [(loss.micro, numbers.kind(*ends)) for loss, ends, _ in window.loss_values]
        losses = [(micro, value) for micro, value in losses if value is not None]
        first = window.bad[0] if window.bad else None
        of = len({id(flag.tensor()) for flag in window.flags if flag.use is None})
        if losses and (first is None or losses[0][0] <= first["micro_batch"]):
            self._event("loss", losses[0][1], window.bad, losses[0][0], of)
        elif first is not None:
            event = ("backward", first["value"], window.bad, first["micro_batch"], of)
            if self._scaling():
                window.deferred = event
            else:
                self._event(*event)

    def _scaling(self):
        scaler = self.scaler() if self.scaler is not None else None
        return scaler is not None and scaler.is_enabled()

    # clipping ----------------------------------------------------------------------------------

    def clipped(self, call, max_norm, norm, raised):
        """Clipping has returned (or raised): keep its norm, and what a check now would say."""
        window = self.window
        window.clip = {"call": call, "max_norm": max_norm, "raised": raised}
        window.norm = norm
        if window.bad:
            window.after_clip = self._census()

    def _census(self):
        """What a script sees that looks through `named_parameters()` for the first bad gradient."""
        pairs = [(name, p) for name, p in self.names.live(self.names.parameters) if p.grad is not None]
        bad = self._bad_of([(name, p.grad) for name, p in pairs])
        if not bad:
            return {"first": None, "bad": 0, "numel": 0, "parameters_bad": 0, "parameters": len(pairs)}
        count = bad[0]["nan"] + bad[0]["posinf"] + bad[0]["neginf"]
        whole = {"parameters_bad": len(bad), "parameters": len(pairs)}
        return {"first": bad[0]["name"], "bad": count, "numel": bad[0]["numel"], **whole}

    # optimizer ---------------------------------------------------------------------------------

    def before_step(self, optimizer):
        """The optimizer is about to move: judge now, and see which bad gradients were repaired."""
        self.judge()
        self.optimizers.add(optimizer)
        flagged = {entry["name"] for entry in self.window.bad}
        if not flagged:
            return
        named = {name: p for name, p in self.names.live(self.names.parameters) if name in flagged}
        dropped = [name for name, p in named.items() if p.grad is None]
        if dropped:
            text = "%d non-finite gradients were set to None before the optimizer" % len(dropped)
            self._repair("gradients_set_to_none", text, dropped)
        kept = [(name, p.grad) for name, p in named.items() if p.grad is not None]
        still = {entry["name"] for entry in self._bad_of(kept)}
        repaired = [name for name, _ in kept if name not in still]
        if repaired:
            text = "%d gradients arrived non-finite and were finite again at the optimizer" % len(repaired)
            self._repair("gradients_repaired", text, repaired)

    def judge_scaled(self, scale):
        """A GradScaler is about to decide, at this scale."""
        self.judge()
        self.window.scale = scale

    def scaler_decided(self, scaler, scale, skipped):
        """A GradScaler stepped or skipped; at scale 1 or below there is nothing left to absorb."""
        window = self.window
        window.scale = scale
        deferred, window.deferred = window.deferred, None
        if deferred is not None and scale <= 1.0:
            self._event(*deferred)
        if skipped:
            text = "the GradScaler skipped step %d at scale %g" % (self.step, scale)
            self._repair("scaler_skip", text, [entry["name"] for entry in window.bad])
            self.end("scaler_skip")

    def end(self, how):
        """The step is over: write it, look at parameters, buffers and state, start the next."""
        self.judge()
        window = self.window
        if not (window.flags or window.losses):
            return
        taken = how == "step"
        if taken and window.deferred is not None:  # the scaler did not absorb it
            self._event(*window.deferred)
        if how == "dropped":
            self._repair("dropped_step", "step %d was dropped: gradients set to None, no optimizer step" % self.step, [])
        norm = self._norm()
        self._check_norm(norm, how)
        self._check_after(taken)
        self.journal.write("step", **self._account(how, taken, norm))
        self.window = Window()
        self.step += 1

    def _norm(self):
        norm = self.window.norm
        if isinstance(norm, torch.Tensor):
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            return float(norm)
        return norm

    def _check_norm(self, norm, how):
        if norm is None or math.isfinite(norm) or how == "scaler_skip":
            return
        if math.isinf(norm):
            text = "the gradient norm was Inf, so clipping set every finite gradient to 0"
            self._repair("zero_after_inf", text, [])
        if not self.window.bad:
            value = "nan" if math.isnan(norm) else "+inf"
            self._event("clip", value, [], max(self.window.micro, 0), len(self.window.flags))

    def _check_after(self, taken):
        """Buffers always (a forward may poison them), parameters and state if the optimizer moved."""
        pairs = [pair for pair in self.names.live(self.names.buffers) if pair[0] not in self.infinite_buffers]
        if taken:
            pairs = self.names.live(self.names.parameters) + pairs
            if self.step <= 3 or self.step % STATE_EVERY == 0 or self.window.bad:
                pairs = pairs + self._state()
        bad = self._bad_of(pairs)
        if bad:
            self._event("optimizer" if taken else "forward", bad[0]["value"], bad, max(self.window.micro, 0), len(pairs))

    def _state(self):
        pairs = []
        for optimizer in list(self.optimizers):
            for parameter, state in optimizer.state.items():
                name = self.names.name(parameter)
                pairs += [(name + "." + key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        return pairs

    def _account(self, how, taken, norm):
        window = self.window
        losses = [
            {"micro_batch": loss.micro, "handed": handed[0], "unscaled": value[0] if loss.unscaled is not None else None}
            for loss, value, handed in window.loss_values
        ]
        return {
            "step": self.step, "taken": taken, "ended": how, "losses": losses,
            "backwards": window.micro + 1, "nested": window.nested, "recomputed": window.recomputed,
            "kernels": window.kernels, "gradients": sum(flag.use is None for flag in window.flags),
            "bad": window.bad[:FIRST_BAD], "norm": norm, "clip": window.clip, "after_clip": window.after_clip,
            "gradient_norms": window.norms, "scale": window.scale, "memory": memory(),
            "seconds": time.perf_counter() - window.began, "probe_seconds": self.clock.take(),
        }  # fmt: skip

    # writing -----------------------------------------------------------------------------------

    def _event(self, phase, value, bad, micro, of):
        self.events += 1
        if self.events > EVENTS:
            return
        self.journal.write(
            "nonfinite",
            step=self.step, micro_batch=micro, rank=rank(), phase=phase, value=value,
            tensors=bad[:FIRST_BAD], bad=len(bad), of=of, scale=self.window.scale,
        )  # fmt: skip

    def _repair(self, code, text, tensors):
        self.journal.write("repair", step=self.step, code=code, text=text, tensors=tensors[:FIRST_BAD])


def memory():
    """Peak bytes of this process on the host and on the device (None without CUDA)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {"host": peak, "device": device}
