"""What an attempt left behind, judged: lines of the probe and of the trainer, and how the process ended.

Pure. Evidence is trusted in a fixed order: a recorded non-finite value stands whatever happened next; a
process that was stopped, killed, or exited non-zero is never finite; and a finite cell must have proved
that the probe was awake and that its settings took effect.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanbisect import presence, ranks
from nanbisect.outcome import CONTENT, Note, Outcome, Site, Smear, Status, number, unwrapped

Line = Mapping[str, Any]
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use|port.{0,80}another process is utilizing it", re.I)
PORT_TAKEN = "port_taken"  # the doubt about an attempt that found its port in use
ABORT = re.compile(r"exitcode\s*:\s*-6\b|SIGABRT|terminate called without an active exception")
SHOWN = 8  # parameters kept in a site
CUT = 256  # ids that the probe lists of one batch
OF_A_MICRO_BATCH = ("loss", "backward", "forward")  # phases whose micro-batch is known; the others are of a whole step


@dataclass(frozen=True)
class Effect:
    """What the settings became. `failed`: one is not what was asked for, so the cell is not what it claims to be.

    `doubts`: what looks otherwise than its level's name says, but is the recipe's own affair.
    """

    failed: str | None = None
    doubts: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How the process ended, in the executor's words: `why` is exited unless somebody ended it.

    `stragglers`: processes of its own that were still there; `started`: cold, warm or kept.
    """

    why: str
    code: int | None
    signal: int | None
    seconds: float
    oom_kill: bool
    stragglers: int = 0
    started: str = ""


@dataclass(frozen=True)
class Evidence:
    """All lines of an attempt. `probe` holds the events of all ranks by time, each with its `rank`, `diary` the
    trainer's own lines.

    `reached`: a Python process read our PYTHONPATH; `armed`: one imported torch, too. `lost`: lines of the probe are
    missing or not of the form that its schema gives. `port_taken`: the log says that a port was in use.
    """

    ending: Ending
    probe: tuple[Line, ...]
    diary: tuple[Line, ...]
    armed: bool
    lost: bool = False
    log_tail: tuple[str, ...] = ()
    port_taken: bool = False
    reached: bool = False

    @property
    def left(self) -> bool:
        """Whether processes were still there when the main one had ended."""
        return self.ending.stragglers > 0

    def events(self, kind: str) -> list[Line]:
        """The probe's events of one kind."""
        return [line for line in self.probe if line.get("kind") == kind]

    def lines(self, kind: str) -> list[Line]:
        """The trainer's lines of one kind."""
        return [line for line in self.diary if line.get("kind") == kind]

    @property
    def end(self) -> Line:
        """The trainer's last word, or an empty mapping."""
        ends = self.lines("end")
        return ends[-1] if ends else {}


def judge(evidence: Evidence, *, attempt: int, seed: int, effect_of: Callable[[Mapping[str, Any]], Effect]) -> Outcome:
    """The outcome of one attempt. `effect_of` says from the resolved settings which are not as requested."""
    resolved = resolve(evidence)
    effect = effect_of(resolved) if evidence.events("step") else Effect()
    status, reason = _status(evidence, effect)
    site = _site(evidence) if status is Status.NONFINITE else None
    losses, norms = (_unbroken(curve) for curve in _curves(evidence))
    load, train = _times(evidence)
    outcome = Outcome(
        status=status,
        reason=reason,
        attempt=attempt,
        seed=seed,
        site=site,
        smear=_smear(evidence) if site else None,
        loss=losses,
        grad_norm=norms,
        channels=_channels(evidence),
        first_gradients=_first_gradients(evidence),
        records=_records(evidence),
        all_records=all(0 < len(_ids(line)) < CUT for line in _trained(evidence)),
        resolved=resolved,
        repairs=_repairs(evidence),
        doubts=(
            *_doubts(evidence, status),
            *(presence.doubts(evidence) if status is Status.FINITE else ()),
            *effect.doubts,
        ),
        seconds=evidence.ending.seconds,
        load_seconds=load,
        train_seconds=train,
        micro_batches=len(evidence.lines("micro_batch")),
        memory_bytes=_memory(evidence),
        log_tail=() if status.judged else evidence.log_tail,
        started=evidence.ending.started,
    )
    how = evidence.end.get("how")
    blocked = evidence.end.get("levels", {}) if status is Status.UNSUPPORTED and how == "unsupported" else {}
    suspects = _suspects(evidence) if site else ()
    return replace(outcome, blocked=blocked, suspects=suspects, bad_input=how == "bad_input" and site is None)


# the status ------------------------------------------------------------------------------------


def _status(evidence: Evidence, effect: Effect) -> tuple[Status, str]:
    if evidence.ending.why == PUT_ASIDE:  # whatever it saw, it was not the training of this cell
        return Status.KILLED, STOPPED[PUT_ASIDE]
    event = _first_event(evidence)
    if event is None and (refused := _refused(evidence)) is not None:
        return refused
    if event is None and (ended := _ended_badly(evidence)) is not None:
        return ended
    if event is None and (blind := _blind(evidence)) is not None:
        return blind
    if effect.failed is not None:
        return Status.UNSUPPORTED, f"not judged, because a setting did not take effect: {effect.failed}"
    if event is not None:
        return Status.NONFINITE, _surfaced(evidence, event)
    return Status.FINITE, "every loss, gradient, parameter, buffer and optimizer state was finite" + unseen(evidence)


def unseen(evidence: Evidence) -> str:
    """What finite does not cover: a long run looks at optimizer state now and then, and it may be gone at the end."""
    steps = [line["unseen_since"] for line in evidence.events("exit") if line.get("unseen_since") is not None]
    return f" (optimizer state up to step {min(steps)}, when it was looked at last)" if steps else ""


def _refused(evidence: Evidence) -> tuple[Status, str] | None:
    """The training itself said why it can't train."""
    how, text = evidence.end.get("how"), str(evidence.end.get("text", ""))
    if how == "bad_input":
        return Status.FAILED, text
    return (Status.UNSUPPORTED, text) if how == "unsupported" else None


def _surfaced(evidence: Evidence, event: Line) -> str:
    names = [unwrapped(tensor["name"]) for tensor in event["tensors"]]
    first = f", first in {names[0]}" if names and event["phase"] != "loss" else ""
    micro = f", micro-batch {event['micro_batch']}" if event["phase"] in OF_A_MICRO_BATCH else ""
    site = _site(evidence)
    where = ranks.on_ranks(site) if site else ""
    kept = "" if event.get("backward", True) else ", which the script did not hand to backward"
    steps = site.steps if site else f"step {event['step']}"
    return f"{event['value']} in {event['phase']} of {steps}{micro}{first}{where and ', '}{where}{kept}"


def _ended_badly(evidence: Evidence) -> tuple[Status, str] | None:
    """Anything but an orderly end, in order: told to stop, out of memory, a signal, an error."""
    ending, how = evidence.ending, evidence.end.get("how")
    if ending.why == "timed_out":
        return Status.TIMED_OUT, f"not done after {ending.seconds:.0f} s"
    if ending.why != "exited":
        return Status.KILLED, STOPPED.get(ending.why, ending.why)
    if how == "out_of_memory":
        return Status.OUT_OF_MEMORY, str(evidence.end.get("text"))
    if ending.oom_kill:
        return Status.OUT_OF_MEMORY, "the kernel ended the process because the machine was out of memory"
    if how is None and not evidence.diary and (ending.code == 0 or evidence.events("stopped") or _aborted(evidence)):
        return None  # a command says nothing of itself; after a stop of ours its code is noise
    if ending.signal is not None:
        return _signalled(ending.signal)
    if how == "error":
        return Status.FAILED, str(evidence.end.get("text"))
    if how == "stopped":
        return Status.FAILED, "not judged: the training stopped at a non-finite value, and the event itself was lost"
    if ending.code != 0 or how != "done":
        last = f"; its log ends with: {evidence.log_tail[-1]}" if evidence.log_tail else ""
        early = " before it was done" if evidence.diary else ""
        why = presence.absent(evidence)
        return Status.FAILED, f"the training exited with code {ending.code}{early}{last}{f'; {why}' if why else ''}"
    return None


def _aborted(evidence: Evidence) -> bool:
    """Whether ranks were all done in good order, and one of them then aborted: a plain DDP script under gloo does so
    now and then, after its Python has ended, and its launcher ends the others."""
    tail = "\n".join(evidence.log_tail)
    codes = set(re.findall(r"exitcode\s*:\s*(-?\d+)", tail))
    return (
        ranks.world(evidence.probe) > 1
        and not evidence.events("raised")
        and presence.told_to_the_end(evidence)
        and codes <= {"0", f"-{signal.SIGABRT.value}", f"-{signal.SIGTERM.value}"}
        and ABORT.search(tail) is not None
    )


PUT_ASIDE = "put_aside"
STOPPED = {
    PUT_ASIDE: "its process no longer had the model as it was loaded, so nothing of it counts",
    "cancelled": "stopped by nanbisect before it ended",
    "driver_died": "nanbisect itself died while it ran",
    "lost": "its processes were killed from outside",
}


def _signalled(number: int) -> tuple[Status, str]:
    name = signal.Signals(number).name if number in signal.Signals.__members__.values() else str(number)
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return Status.KILLED, f"killed from outside by {name}"
    return Status.FAILED, f"crashed with {name}"


def _blind(evidence: Evidence) -> tuple[Status, str] | None:
    """Why finite can't be claimed although nothing bad was seen."""
    if (missing := presence.nothing_seen(evidence) or presence.cut_short(evidence)) is not None:
        return missing
    partial = evidence.events("partial")
    if partial:
        return Status.FAILED, f"not judged: the probe could not see all gradients: {partial[0]['reason']}"
    steps = evidence.lines("step")
    if evidence.lost or not presence.told_to_the_end(evidence) or len(evidence.events("step")) < len(steps):
        return Status.FAILED, "not judged: events of the probe were lost (a full disk, or a process that was killed)"
    if steps and not steps[-1]["taken"]:
        return Status.FAILED, "not judged: the GradScaler skipped the last step again and again"
    if any(line["taken"] and not _all_finite(line) for line in steps):
        return Status.FAILED, "not judged: the training's own loss or norm was non-finite, and the probe saw nothing"
    checks = evidence.events("self_check")
    if not checks or not all(line.get("seen") for line in checks):
        return Status.FAILED, "not judged: the probe did not see the NaN that it planted itself"
    seen, of = len({ranks.rank_of(line) for line in checks}), ranks.world(checks)
    if seen < of:
        return Status.FAILED, f"not judged: of {of} processes that train together the probe saw {seen}"
    errors = evidence.events("probe_error")
    if errors:
        return Status.FAILED, f"not judged: the probe failed in {errors[0]['where']}: {errors[0]['error']}"
    return None


def _all_finite(step: Line) -> bool:
    """Whether loss and norm of a step are numbers, not names of non-finite values."""
    return not any(isinstance(value, str) for value in (step["grad_norm"], *step["losses"]))


# where -----------------------------------------------------------------------------------------


def _first_event(evidence: Evidence) -> Line | None:
    """The first event, with the step as the user counts it: tries of one step under a GradScaler are one."""
    first = ranks.first_event(evidence.events("nonfinite"))
    if first is None:
        return None
    return {**first, "try": first["step"], "step": _window_of(evidence, first["step"])}


def _window_of(evidence: Evidence, step: int) -> int:
    """The optimizer step that the probe's step (a try) belongs to; the same where the trainer says nothing."""
    windows = [line["window"] for line in evidence.diary if line.get("step") == step and "window" in line]
    return int(windows[0]) if windows else step


def _site(evidence: Evidence) -> Site | None:
    event = _first_event(evidence)
    if event is None:
        return None
    losses, _ = _curves(evidence)
    return Site(
        step=event["step"],
        micro_batch=event["micro_batch"],
        rank=event["rank"],
        phase=event["phase"],
        kind=event["value"],
        parameters=tuple(unwrapped(tensor["name"]) for tensor in event["tensors"][:SHOWN]),
        channels=_bad_channels(evidence, event),
        loss=losses.get(event["step"]),
        ranks=ranks.spread({**event, "step": event["try"]}, evidence.events("nonfinite"), ranks.world(evidence.probe)),
        since=event.get("since"),  # numbered as the run's own steps: only a long run, which has no diary, has it
    )


def _bad_channels(evidence: Evidence, event: Line) -> tuple[str, ...]:
    """Channels whose own loss was non-finite in the micro-batch of the event."""
    for line in evidence.lines("step"):
        if line["step"] == event["try"] and event["micro_batch"] < len(line["channels"]):
            sums = line["channels"][event["micro_batch"]]
            return tuple(name for name, (total, _) in sums.items() if isinstance(total, str))
    return ()


def _smear(evidence: Evidence) -> Smear | None:
    """What a check after clipping would have said in the step of the event."""
    event = _first_event(evidence)
    if event is None:
        return None
    place = (event["try"], event["rank"])
    for line in (line for line in evidence.events("step") if (line["step"], ranks.rank_of(line)) == place):
        census = line.get("after_clip")
        if line["bad"] and census and census["first"] is not None:
            return Smear(census["first"], census["bad"], census["numel"], unwrapped(line["bad"][0]["name"]))
    return None


# numbers ---------------------------------------------------------------------------------------


def _unbroken(curve: Mapping[int, float]) -> tuple[float, ...]:
    """Its values from step 1 on, up to the first that is not known: a long run writes few of its steps."""
    steps = itertools.takewhile(lambda step: step in curve, itertools.count(1))
    return tuple(curve[step] for step in steps)


def _curves(evidence: Evidence) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Loss (mean of the micro-batches) and gradient norm by step; the probe's where the trainer's are missing."""
    losses, norms = ({}, {}) if evidence.lines("step") else _curves_of_ranks(evidence)
    for line in evidence.lines("step"):  # of several tries of a step the last one counts
        values = [number(value) for value in line["losses"]]
        losses[line["window"]] = sum(values) / max(len(values), 1)
        norms[line["window"]] = number(line["grad_norm"])
    return losses, norms


def _curves_of_ranks(evidence: Evidence) -> tuple[dict[int, float], dict[int, float]]:
    """Loss and norm by step, the mean over ranks: each of them has a loss of its own."""
    losses: defaultdict[int, dict[int, float]] = defaultdict(dict)
    norms: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for line in evidence.events("step"):
        step, rank = line["step"], ranks.rank_of(line)
        values = [
            number(entry["handed"] if entry["unscaled"] is None else entry["unscaled"]) for entry in line["losses"]
        ]
        if values:
            losses[step][rank] = sum(values)
        if line["norm"] is not None:
            norms[step][rank] = number(line["norm"])
    return _means(losses), _means(norms)


def _means(by_step: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    return {step: ranks.mean(values) for step, values in by_step.items()}


def _steps_by_rank(evidence: Evidence) -> list[Line]:
    """The probe's accounts of steps, those of a step in the order of ranks."""
    return sorted(evidence.events("step"), key=lambda line: (line["step"], ranks.rank_of(line)))


def _channels(evidence: Evidence) -> dict[str, tuple[float, float]]:
    """Mean loss and number of labels of each channel over the first step."""
    lines = [line for line in evidence.lines("step") if line["taken"]]
    sums: dict[str, tuple[float, float]] = {}
    for micro in lines[0]["channels"] if lines else ():
        for name, (total, count) in micro.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + number(total), before[1] + number(count))
    return {name: (total / count if count else 0.0, count) for name, (total, count) in sums.items()}


def _first_gradients(evidence: Evidence) -> dict[str, float]:
    """L2 norms of step 1, if the optimizer took it; a GradScaler's scale is taken out again."""
    for line in _steps_by_rank(evidence):
        if line["step"] == 1 and line.get("gradient_norms") and line["taken"]:
            scale = number(line["scale"]) if line["scale"] is not None else 1.0
            return {unwrapped(name): number(value) / scale for name, value in line["gradient_norms"].items()}
    return {}


def _records(evidence: Evidence) -> tuple[str, ...]:
    """Ids in the order in which training first met them."""
    return tuple(dict.fromkeys(identifier for line in _trained(evidence) for identifier in _ids(line)))


def _trained(evidence: Evidence) -> list[Line]:
    """Without what a script looked at and skipped."""
    return [line for line in _served(evidence) if line.get("backward", True)]


def _served(evidence: Evidence) -> list[Line]:
    """What each micro-batch held: the trainer's word, or what the probe saw of a command's data."""
    batches = evidence.events("batch")
    batches.sort(key=lambda line: (line["step"], line["micro_batch"], ranks.rank_of(line)))
    return evidence.lines("micro_batch") or batches


def _ids(line: Line) -> list[str]:
    """Record ids of a micro-batch; where a batch has none, its rows of the dataset as `row 17`, else their marks."""
    if line.get("records"):
        return [str(identifier) for identifier in line["records"]]
    rows = [f"row {index}" for index in line.get("indices") or ()]
    return rows or [f"{CONTENT}{mark}" for mark in line.get("contents") or ()]


def _place(line: Line) -> tuple[int, int, bool]:
    """Rank and micro-batch of a batch or an event, and whether it was handed to backward."""
    return ranks.rank_of(line), line["micro_batch"], line.get("backward", True)


def _suspects(evidence: Evidence) -> tuple[str, ...]:
    """Records of the micro-batch in which it surfaced, on its rank; of the whole step, or of several, of all ranks,
    where only that is known; none at load."""
    event = _first_event(evidence)
    if event is None or event["phase"] == "load":
        return ()
    before = event["try"] - 1 if event.get("since") is None else event["since"]
    lines = [line for line in _served(evidence) if before < line["step"] <= event["try"]]
    if event["phase"] in OF_A_MICRO_BATCH and evidence.diary:
        lines = lines[event["micro_batch"] : event["micro_batch"] + 1]
    elif event["phase"] in OF_A_MICRO_BATCH:
        lines = [line for line in lines if _place(line) == _place(event)]
    return tuple(dict.fromkeys(identifier for line in lines for identifier in _ids(line)))


def _times(evidence: Evidence) -> tuple[float | None, float | None]:
    """Seconds to load (process start included) and to train."""
    loaded = evidence.lines("loaded")
    if not loaded or not evidence.diary:
        return None, None
    train = evidence.diary[-1]["at"] - loaded[0]["at"]
    return max(0.0, evidence.ending.seconds - train), train


def _memory(evidence: Evidence) -> int | None:
    """Peak bytes: the device's where there is one, else the host's."""
    peaks = [line["memory"]["device"] or line["memory"]["host"] for line in evidence.events("step")]
    return max(peaks) if peaks else None


# notes -----------------------------------------------------------------------------------------


def _repairs(evidence: Evidence) -> tuple[Note, ...]:
    """Silent repairs, the first of each code with the number of times."""
    found: dict[str, list[Line]] = {}
    for line in evidence.events("repair"):
        if line["code"] != "scaler_skip":  # told as a doubt, with its scales
            found.setdefault(line["code"], []).append(line)
    return tuple(Note(code, _repair_words(evidence, code, lines)) for code, lines in found.items())


def _repair_words(evidence: Evidence, code: str, lines: Sequence[Line]) -> str:
    """The first one, how often more (a long run writes only the first lines, and counts), and on which ranks."""
    times: Counter[int] = Counter(ranks.rank_of(line) for line in lines)
    for line in evidence.events("exit"):
        rank = ranks.rank_of(line)
        times[rank] = max(times[rank], line["repairs"].get(code, 0))
    more, of = max(times.values()) - 1, ranks.world(evidence.probe)
    often = f" (and {more} more {'time' if more == 1 else 'times'})" if more else ""
    told = sorted(rank for rank, count in times.items() if count)
    return f"{lines[0]['text']}{often}{f', on {ranks.named(told)} of {of}' if len(told) < of else ''}"


def _doubts(evidence: Evidence, status: Status) -> tuple[Note, ...]:
    notes = []
    if evidence.port_taken and status is Status.FAILED:
        notes.append(Note(PORT_TAKEN, "its log says that a port was in use; such an attempt is made once more"))
    skipped = [line for line in _steps_by_rank(evidence) if line["ended"] == "scaler_skip"]
    skips = list({line["step"]: line for line in reversed(skipped)}.values())[::-1]  # each step once
    if skips:
        scales = [number(line["scale"]) for line in skips]
        times = "once" if len(skips) == 1 else f"{len(skips)} times"
        span = f"scale {scales[0]:g}" if len(skips) == 1 else f"scales {scales[0]:g} to {scales[-1]:g}"
        text = f"the GradScaler skipped a step {times}, at {span}: an overflow that it absorbs"
        notes.append(Note("scaler_skip", text))
    errors = evidence.events("probe_error")
    if errors:
        notes.append(Note("probe_error", f"the probe failed in {errors[0]['where']}: {errors[0]['error']}"))
    if evidence.ending.code and not evidence.events("stopped") and _aborted(evidence):
        text = (
            "a rank aborted when its training had ended in good order, as under gloo now and then; its code is left out"
        )
        notes.append(Note("aborted_at_exit", text))
    apart = ranks.apart(evidence.events("self_check"), _ids_by_place(evidence))
    if apart is not None:
        notes.append(Note("trained_apart", apart))
    return tuple(notes)


def _ids_by_place(evidence: Evidence) -> Iterator[tuple[Line, list[str]]]:
    """Batches of the probe with their ids, as far as they have any."""
    return ((line, ids) for line in evidence.events("batch") if (ids := _ids(line)))


# resolved --------------------------------------------------------------------------------------


def resolve(evidence: Evidence) -> dict[str, Any]:
    """What the settings became: the trainer's account, and what the probe saw of it in the first step."""
    loaded = evidence.lines("loaded")
    found: dict[str, Any] = dict(loaded[0]["resolved"]) if loaded else {}
    roots, steps = evidence.events("root"), _steps_by_rank(evidence)
    if roots:
        found["dropout"] = any(root["dropout"] for root in roots)
        largest = max(roots, key=lambda root: root["parameters"])
        found.setdefault("parameter_dtypes", dict(largest["dtypes"]))
        found.setdefault("device", largest["device"])
    if steps:
        found |= {"kernels": steps[0]["kernels"], "nested": steps[0]["nested"], "recomputed": steps[0]["recomputed"]}
        found["casts"] = steps[0].get("casts")
    for line in evidence.lines("recipe_read"):
        found |= {"read_by_recipe": line["settings"], "autocast": line["autocast"]}
    micro = evidence.lines("micro_batch")
    if micro:
        found |= {name: micro[0][name] for name in ("length", "padding", "positions") if name in micro[0]}
        found["rows"] = len(micro[0]["records"])
    for line in evidence.lines("step")[:1]:
        counts = [{name: count for name, (_, count) in parts.items()} for parts in line["channels"]]
        found["valid_labels"] = counts[0] if counts else {}
        found["valid_labels_equal"] = all(count == counts[0] for count in counts)
    return found


def says_port_taken(text: str) -> bool:
    """Whether a launcher or a library says in a log that it can't listen on its port."""
    return PORT_IN_USE.search(text) is not None


def log_tail(text: str, lines: int = 20) -> tuple[str, ...]:
    """The last lines of a log that say something."""
    kept: Sequence[str] = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(line[:400] for line in kept[-lines:])
