"""Which slots an attempt takes, whether a GPU has memory for it, and which GPU is at fault. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanbisect.outcome import Status

ITS_OWN = (Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED, Status.TIMED_OUT)  # what a faulty GPU looks like
ENOUGH = 2  # different cells that must fail on a GPU before it is doubted
NEARLY_ALL = 15 / 16  # of a GPU's memory: with so much free nobody holds it, a desktop aside
GIB = 1 << 30


# who gets which -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What an attempt needs: `width` slots at once, none of `avoid`."""

    width: int
    avoid: frozenset[str] = frozenset()


def share_out(wishes: Sequence[Wish], free: Sequence[str]) -> list[tuple[str, ...]]:
    """The slots of each wish, in turn; empty for one that waits. `free` has the slots to prefer first.

    A wish gets all its slots or none: two half-served ones would wait for each other for ever. One that
    waits keeps back every free slot that it could use, so narrower ones behind it can't starve it.
    """
    left, given = list(free), []
    for wish in wishes:
        fit = [slot for slot in left if slot not in wish.avoid]
        taken = tuple(fit[: wish.width]) if len(fit) >= wish.width else ()
        left = [slot for slot in left if slot not in (taken or fit)]
        given.append(taken)
    return given


# memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU; `memory` in bytes, None where nobody may know."""

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes. What this run's own processes hold counts as free, and `holders` are the others."""

    total: int
    free: int
    holders: tuple[Holder, ...] = ()


def shortage(gpu: Gpu, peak: int | None) -> str | None:
    """Who holds the memory that a cell needs, in words; None where there is enough.

    A cell needs what the largest finished one had, and half of the GPU before any has finished.
    """
    need = gpu.total // 2 if peak is None else peak
    if gpu.free >= min(need, int(gpu.total * NEARLY_ALL)):
        return None
    known = sorted(gpu.holders, key=lambda holder: -(holder.memory or 0))
    who = ", ".join(_holder(holder) for holder in known[:3]) or "a process that can't be seen from here"
    return (
        f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB are free, {need / GIB:.1f} are needed; the rest has {who}"
    )


def _holder(holder: Holder) -> str:
    size = "" if holder.memory is None else f", {holder.memory / GIB:.1f} GiB"
    return f"{holder.name} (process {holder.pid}{size})"


# fault ----------------------------------------------------------------------------------------


Made = tuple[str, int]
"""A cell's id and a seed: what an attempt is an attempt of."""


@dataclass(frozen=True)
class Trial:
    """An attempt that has ended: of what, on which slots, how."""

    made: Made
    slots: tuple[str, ...]
    status: Status

    @property
    def failed(self) -> bool:
        """Whether it may have been the GPU."""
        return self.status in ITS_OWN


def works(trials: Sequence[Trial]) -> set[str]:
    """Slots on which something was judged: those are in order."""
    return {slot for trial in trials if trial.status.judged for slot in trial.slots}


def failures(trials: Sequence[Trial], slot: str) -> list[Made]:
    """What failed on a slot where nothing was ever judged, less what ended no better on slots in order."""
    good = works(trials)
    if slot in good:
        return []
    excused = {trial.made for trial in trials if not trial.status.judged and good.issuperset(trial.slots)}
    made = dict.fromkeys(trial.made for trial in trials if trial.failed and slot in trial.slots)
    return [one for one in made if one not in excused]


def at_fault(trials: Sequence[Trial], slot: str) -> list[str]:
    """The cells that failed on this slot, if that is its fault: enough of them, and one was judged elsewhere."""
    failed = failures(trials, slot)
    cells = list(dict.fromkeys(cell for cell, _ in failed))
    return cells if len(cells) >= ENOUGH and _judged(trials).intersection(failed) else []


def doubted(trials: Sequence[Trial], slots: Collection[str], *, width: int, last: bool = False) -> list[str]:
    """Slots to leave alone until one of the cells that failed there was made again where cells are judged.

    `last`: nothing else is left to do, so that one failed cell is doubt enough. Nothing is doubted where
    there is no other place to try.
    """
    if len(works(trials) & {*slots}) < width:
        return []
    least = 1 if last else ENOUGH
    failed = {slot: failures(trials, slot) for slot in slots}
    judged = _judged(trials)
    return [
        slot for slot, made in failed.items() if len({cell for cell, _ in made}) >= least and judged.isdisjoint(made)
    ]


def to_repeat(
    trials: Sequence[Trial], slots: Collection[str], *, width: int, lost: Mapping[str, bool], last: bool = False
) -> list[str]:
    """Cells to make again where cells are judged, for what their slot may have done to them.

    `slots` are those in use, `lost` those put aside: True for a GPU at fault, False for one whose memory
    somebody took. Of a doubted slot one cell is made again, of a lost one all.
    """
    good = works(trials) & {*slots}
    if len(good) < width:
        return []
    made = [failures(trials, slot)[0] for slot in doubted(trials, slots, width=width, last=last)]
    made += [one for slot, fault in lost.items() for one in _of_lost(trials, slot, fault)]
    settled = _judged(trials) | {trial.made for trial in trials if good.issuperset(trial.slots)}
    return list(dict.fromkeys(one[0] for one in made if one not in settled))


def _of_lost(trials: Sequence[Trial], slot: str, fault: bool) -> Iterator[Made]:
    for trial in trials:
        if slot in trial.slots and (trial.failed if fault else trial.status is Status.OUT_OF_MEMORY):
            yield trial.made


def _judged(trials: Sequence[Trial]) -> set[Made]:
    return {trial.made for trial in trials if trial.status.judged}
