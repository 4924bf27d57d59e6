"""What the probe sees of forward and backward: roots, leaves, losses. Gradients are seen by `arrivals`."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any, Sequence

import torch

from . import inputs, numbers
from .arrivals import Arrivals
from .batches import Batches, Forward
from .graph import Walk
from .handles import Handles
from .ledger import Ledger
from .limits import Limits
from .names import Names, dropout_active, sharded_paths, smallest_holder
from .partial import reason
from .steps import Steps
from .stopping import Stopper
from .window import Clock, Loss, Window

SEARCHES = 3  # walks over all objects alive, to find a module that training never calls
TINY = 1 << 10  # scaled losses remembered at most


class Observer:
    """Takes what the patches see. One a process."""

    def __init__(self, journal: Ledger, limits: Limits) -> None:
        self.journal = journal
        self.clock = Clock()
        self.handles = Handles()
        self.names = Names(self.handles)
        self.batches = Batches()
        self.steps = Steps(journal, self.names, self.clock, self.batches)
        self.stopper = Stopper(limits, journal)
        self.arrivals = Arrivals(self.steps, self.handles, self.clock)
        self._begin()

    def _begin(self) -> None:
        self.roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.scaled: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.checked = False
        self.finished = 0  # the process that wrote its last line
        self.searches = 0
        self.settled = False  # all leaves have their names from one module
        self.sharded: dict[int, str] = {}

    def forked(self) -> None:
        """This is a child now: what the parent saw stays the parent's."""
        self._begin()
        self.names = self.steps.names = Names(self.handles)
        self.clock.restart()
        self.batches = self.steps.batches = Batches()
        self.journal.begin()
        self.stopper.tries = 0
        self.steps.reset()

    @property
    def window(self) -> Window:
        """The step under way."""
        return self.steps.window

    @property
    def found(self) -> bool:
        """Whether a non-finite value has surfaced."""
        return self.steps.events > 0

    def finish(self) -> None:
        """The process ends: write what is left."""
        if self.finished == os.getpid():
            return
        self.finished = os.getpid()
        self.steps.end("exit")
        count, contents = self.steps.count, self.steps.contents
        self.clock.take()
        self.journal.exit(
            steps=count.steps,
            backwards=count.backwards,
            events=self.steps.events,
            unseen_since=contents.whole_step if contents.unseen else None,
            seconds=self.steps.seconds(),
            probe_seconds=self.clock.taken,
        )

    # forward -----------------------------------------------------------------------------------

    def stop_if_due(self) -> None:
        """Raises SystemExit when the driver wants no further step. Called before a training forward."""
        steps = self.steps
        why = self.stopper.why(steps.count, steps.window.micro + 1, steps.events)
        if why is not None and not steps.window.stepping:
            self.stopper.stop(why, steps.count, steps.window.micro + 1)

    def forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A training forward of a root module is about to start."""
        if any(p.requires_grad for p in module.parameters()):
            if not self._known(module):
                self._new_root(module)
            self.steps.forward(Forward(type(module).__name__, inputs.tensors([args, kwargs]) or {}))

    def learn(self, module: torch.nn.Module) -> None:
        """A loop hands over its whole model before the first step."""
        if not self._known(module):
            self._new_root(module)

    def _known(self, module: torch.nn.Module) -> bool:
        reference = self.roots.get(id(module))
        return reference is not None and reference() is module

    def _new_root(self, module: torch.nn.Module, *, rename: bool = False) -> None:
        self.roots[id(module)] = weakref.ref(module)
        parameters, buffers = self.names.learn(module, rename=rename)
        self.sharded.update(sharded_paths(module))
        self._describe(module)
        why = reason(module)
        if why is not None:
            self.journal.write("partial", reason=why)
        self.steps.contents.loaded(self.window, parameters, buffers)

    def _describe(self, module: torch.nn.Module) -> None:
        parameters = list(module.parameters())
        dtypes: dict[str, int] = {}
        for parameter in parameters:
            key = str(parameter.dtype).replace("torch.", "")
            dtypes[key] = dtypes.get(key, 0) + 1
        sized = [parameter for parameter in parameters if not torch.nn.parameter.is_lazy(parameter)]
        self.journal.write(
            "root",
            module=type(module).__name__,
            parameters=len(parameters),
            elements=sum(parameter.numel() for parameter in sized),
            dtypes=dtypes,
            device=str(parameters[0].device),
            dropout=dropout_active(module),
            tied=[[name, *others] for name, others in self.names.tied.items()],
        )

    def _gradients_gone(self) -> bool:
        """Whether no leaf of this step that a module holds has a gradient any more (FSDP's unsharded leaves lose
        theirs anyway); the first one that has one answers."""
        gone = False
        for handle in list(self.window.leaves.values()):
            leaf = handle()
            if leaf is not None and self.names.named(leaf):
                if leaf.grad is not None:
                    return False
                gone = True
        return gone

    def returned(self, output: Any) -> None:
        """A root's forward is over: keep the loss that it returned, in case that it goes no further."""
        if self.window.forwards:
            self.window.forwards[-1].loss = inputs.own_loss(output)

    def gathered(self, module: torch.nn.Module) -> None:
        """A module of FSDP2's has worked, and still has its whole parameters."""
        self.names.gather(self.sharded[id(module)], module)

    def end_without_step(self) -> None:
        """Gradients that are gone at the next forward: dropped by the script, or freed as they arrived."""
        window = self.window
        if not window.leaves or window.stepping or self.steps.frees_gradients:
            return
        if self._gradients_gone():
            self.steps.end("backward_only" if window.consumed else "dropped")

    # backward ----------------------------------------------------------------------------------

    def backward(self, roots: Sequence[Any], nested: bool) -> list[Any]:
        """A backward call is about to run: hook its leaves, note its loss, kernels and tied weights.

        Returns the handles of hooks that `leave` removes.
        """
        if nested:
            self.window.nested += 1
        else:
            self._self_check(roots)
            self.steps.begin_backward()
        walk = Walk(roots)
        kernels = self.window.kernels
        for name, count in walk.kernels.items():
            kernels[name] = kernels.get(name, 0) + count
        leaves = list(walk.leaves.values())
        new = [leaf for leaf in leaves if self.arrivals.hook(leaf)]
        if not nested:
            self._note_losses([root for root in roots if isinstance(root, torch.Tensor)])
            if new or not self.settled:
                self.settled = self._learn_by_search([leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)])
        return [hook for leaf in leaves for hook in self.arrivals.hook_uses(leaf, walk)]

    def leave(self, hooks: Sequence[Any] | None, nested: bool) -> None:
        """The backward call is over (or has raised)."""
        for handle in hooks or ():
            handle.remove()
        if nested:
            return
        self.arrivals.held.clear()
        self.steps.contents.look_at_buffers(self.window)
        if self.window.stepped_inside:
            self.steps.end("step")
        else:
            self.window.consumed = self._gradients_gone()

    def _learn_by_search(self, leaves: list[torch.Tensor]) -> bool:
        """Training may call only parts of the model: find the module that holds all leaves, a few times at most.

        Whether that is settled, for as long as no other leaf comes.
        """
        if self.names.in_one(leaves) or self.searches == SEARCHES:
            return True
        self.searches += 1
        module = smallest_holder(leaves)
        if module is not None and not self._known(module):
            self._new_root(module, rename=True)
        return False

    def scaled_by(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """A GradScaler scaled losses: keep what they were before."""
        if not scaler.is_enabled():
            return
        self.steps.scaler = weakref.ref(scaler)
        single = isinstance(outputs, torch.Tensor)
        pairs = zip([outputs] if single else outputs, [scaled] if single else scaled)
        self.scaled = {key: kept for key, kept in self.scaled.items() if kept[0]() is not None}
        for before, after in pairs:
            if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and len(self.scaled) < TINY:
                ends = numbers.ends(before)
                if ends is not None:
                    self.scaled[id(after)] = (weakref.ref(after), ends)

    def _note_losses(self, roots: list[torch.Tensor]) -> None:
        for root in roots:
            handed = numbers.ends(root) if root.numel() == 1 and root.requires_grad else None
            if handed is not None:
                reference, unscaled = self.scaled.get(id(root), (None, None))
                known = unscaled if reference is not None and reference() is root else None
                self.window.losses.append(Loss(self.window.micro, handed, known))

    def _self_check(self, roots: Sequence[Any]) -> None:
        """Plant a NaN once, through the same backward, hook and reading as real gradients.

        Nothing is saved for backward (the script may watch saved tensors), and anomaly mode would raise.
        """
        if self.checked or not roots:
            return
        self.checked = True
        device = next((root.device for root in roots if isinstance(root, torch.Tensor)), torch.device("cpu"))
        kept, self.steps.window = self.window, Window(1)
        try:
            with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
                scratch = torch.ones(2, device=device, requires_grad=True)
                torch.autograd.backward(scratch.clone(), torch.tensor([1.0, math.nan], device=device))
            values = numbers.read([flag.ends for flag in self.window.flags])
        finally:
            self.steps.window = kept
        seen = any(numbers.kind(low, high) == "nan" for low, high in values)
        self.journal.write("self_check", seen=seen, device=str(device))
