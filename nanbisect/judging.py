"""An attempt judged by what it left behind.

Pure. Evidence is trusted in a fixed order: a recorded non-finite value stands whatever happened next; a
process that was stopped, killed, or exited non-zero is never finite; and a finite cell must have proved
that the probe was awake and that its settings took effect.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanbisect import presence, ranks, sightings
from nanbisect.evidence import PORT_TAKEN, Effect, Evidence, Line
from nanbisect.outcome import Note, Outcome, Status, number, unwrapped

ABORT = re.compile(r"exitcode\s*:\s*-6\b|SIGABRT|terminate called without an active exception")
PUT_ASIDE = "put_aside"
STOPPED = {
    PUT_ASIDE: "its process no longer had the model as it was loaded, so nothing of it counts",
    "cancelled": "stopped by nanbisect before it ended",
    "driver_died": "nanbisect itself died while it ran",
    "lost": "its processes were killed from outside",
}


def judge(evidence: Evidence, *, attempt: int, seed: int, effect_of: Callable[[Mapping[str, Any]], Effect]) -> Outcome:
    """The outcome of one attempt. `effect_of` says from the resolved settings which are not as requested."""
    resolved = resolve(evidence)
    effect = effect_of(resolved) if evidence.events("step") else Effect()
    status, reason = _status(evidence, effect)
    site = sightings.site_of(evidence) if status is Status.NONFINITE else None
    losses, norms = (sightings.unbroken(curve) for curve in sightings.curves_of(evidence))
    load, train = sightings.times_of(evidence)
    outcome = Outcome(
        status=status,
        reason=reason,
        attempt=attempt,
        seed=seed,
        site=site,
        smear=sightings.smear_of(evidence) if site else None,
        loss=losses,
        grad_norm=norms,
        channels=sightings.channels_of(evidence),
        first_gradients=sightings.first_gradients_of(evidence),
        records=sightings.records_of(evidence),
        all_records=all(0 < len(sightings.ids_of(line)) < sightings.CUT for line in sightings.trained_of(evidence)),
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
        memory_bytes=sightings.memory_of(evidence),
        log_tail=() if status.judged else evidence.log_tail,
        started=evidence.ending.started,
    )
    how = evidence.end.get("how")
    blocked = evidence.end.get("levels", {}) if status is Status.UNSUPPORTED and how == "unsupported" else {}
    suspects = sightings.suspects_of(evidence) if site else ()
    return replace(outcome, blocked=blocked, suspects=suspects, bad_input=how == "bad_input" and site is None)


def _status(evidence: Evidence, effect: Effect) -> tuple[Status, str]:
    if evidence.ending.why == PUT_ASIDE:  # whatever it saw, it was not the training of this cell
        return Status.KILLED, STOPPED[PUT_ASIDE]
    event = sightings.first_event(evidence)
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
    micro = f", micro-batch {event['micro_batch']}" if event["phase"] in sightings.OF_A_MICRO_BATCH else ""
    site = sightings.site_of(evidence)
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
    skipped = [line for line in sightings.steps_by_rank(evidence) if line["ended"] == "scaler_skip"]
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
    apart = ranks.apart(evidence.events("self_check"), sightings.ids_by_place(evidence))
    if apart is not None:
        notes.append(Note("trained_apart", apart))
    return tuple(notes)


def resolve(evidence: Evidence) -> dict[str, Any]:
    """What the settings became: the trainer's account, and what the probe saw of it in the first step."""
    loaded = evidence.lines("loaded")
    found: dict[str, Any] = dict(loaded[0]["resolved"]) if loaded else {}
    roots, steps = evidence.events("root"), sightings.steps_by_rank(evidence)
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
