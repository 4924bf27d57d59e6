"""The slots of a run: who has them, which GPU somebody else holds, which one is put aside and why.

`slots` thinks; here is what changes while a run goes on: the free slots, what was seen of their memory,
and how attempts ended on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from nanbisect import slots as thinking
from nanbisect.errors import ExecutorError, UsageError
from nanbisect.machine import Machine, Occasion
from nanbisect.neutrality import listed
from nanbisect.outcome import Note, Status
from nanbisect.slots import Trial, Wish

FAILING, TAKEN, BUSY = "gpu_failing", "gpu_taken", "gpu_busy"
LOOK_AGAIN = 2.0  # seconds for which a look at a GPU's memory holds

Waiting = TypeVar("Waiting")
Tell = Callable[[str, Note], None]
"""Hears of a slot, and what is to be said of it: BUSY now, TAKEN and FAILING for good."""


class Pool:
    """Hands out slots. `width` of them make a cell; `peak` is the memory of the largest judged cell, in bytes."""

    def __init__(self, machine: Machine, width: int | None, occasion: Occasion, *, peak: int | None = None) -> None:
        self.slots, self.on_gpus, self.occasion = machine.slots, machine.on_gpus, occasion
        self.width = (width or max(1, len(self.slots))) if self.on_gpus else 1
        if self.width > len(self.slots) > 0:
            raise UsageError(f"gpus_per_cell is {width}, and there are {len(self.slots)} GPUs\ntry: a smaller number")
        self.tell: Tell = lambda slot, note: None
        self.peak = peak
        self.free = list(self.slots)
        self.aside: dict[str, Note] = {}
        self.trials: list[Trial] = []
        self._again: dict[bool, list[str]] = {}  # by `last`, as of the latest trial
        self._doubted: dict[bool, list[str]] = {}
        self._fit: dict[str, float] = {}  # slot -> when it was seen to have memory enough
        self._short: dict[str, tuple[float, float, str]] = {}  # slot -> since when not, when last looked at, who has it

    @property
    def in_use(self) -> list[str]:
        """All slots but those put aside."""
        return [slot for slot in self.slots if slot not in self.aside]

    @property
    def at_once(self) -> int:
        """How many cells can be under way."""
        return max(1, len(self.in_use) // self.width)

    @property
    def has_room(self) -> bool:
        """Whether a cell could start, or never will again: `require` tells."""
        return len(self._open()) >= self.width

    # giving and taking back

    def place(
        self, waiting: Sequence[tuple[Waiting, str]], *, last: bool = False
    ) -> Iterator[tuple[Waiting, tuple[str, ...]]]:
        """Who starts now, and where. `waiting` has them in turn, each with its cell's id.

        `last`: nothing else is under way or left to do than these.
        """
        again = {*self.to_repeat(last=last)}
        wishes = [Wish(self.width, self._to_avoid(cell in again)) for _, cell in waiting]
        for (who, _), taken in zip(waiting, thinking.share_out(wishes, self._usable(last=last)), strict=True):
            if taken:
                self.free = [slot for slot in self.free if slot not in taken]
                yield who, tuple(sorted(taken, key=self.slots.index))

    def release(self, slots: Sequence[str]) -> None:
        """Takes slots back."""
        self.free = sorted({*self.free, *slots}, key=self.slots.index)

    def _open(self) -> list[str]:
        return [slot for slot in self.free if slot not in self.aside]

    def _usable(self, *, last: bool) -> list[str]:
        """Free slots with memory enough that nothing speaks against, those without a failure first."""
        if not self.on_gpus:
            return self._open()
        failed = {slot: len({cell for cell, _ in thinking.failures(self.trials, slot)}) for slot in self._open()}
        waits = self._doubted.get(last, [])
        if set(self.slots) - {*self.free, *self.aside}:  # what is under way elsewhere will tell more
            waits = [*waits, *(slot for slot, cells in failed.items() if cells >= thinking.ENOUGH)]
        return sorted(self._with_memory([slot for slot in failed if slot not in waits]), key=failed.__getitem__)

    def _to_avoid(self, again: bool) -> frozenset[str]:
        """A cell that is made again for its slot's sake goes where cells are judged."""
        return frozenset(self.slots) - thinking.works(self.trials) if again else frozenset()

    # fault

    def ended(self, trial: Trial, memory: int | None) -> None:
        """Learns from an attempt; puts a GPU aside that is at fault."""
        self.trials.append(trial)
        if trial.status.judged and memory is not None:
            self.peak = max(self.peak or 0, memory)
        for slot in self.in_use if self.on_gpus else ():
            cells = thinking.at_fault(self.trials, slot)
            if cells:
                text = (
                    f"GPU {slot} was put aside: {listed(cells, 3)} failed there, of which at least one was judged "
                    "on another GPU, and nothing was ever judged on this one"
                )
                self._put_aside(slot, Note(FAILING, text))
        self._think()

    def to_repeat(self, *, last: bool = False) -> list[str]:
        """Ids of cells to make again on another GPU. `last`: nothing else is under way or left to do."""
        return self._again.get(last, [])

    def killed(self, times: int) -> set[str]:
        """Cells killed more often than that where it may have been their own fault."""
        killed = [trial for trial in self.trials if trial.status is Status.KILLED]
        counts = Counter(trial.made[0] for trial in killed if self.aside.keys().isdisjoint(trial.slots))
        return {cell for cell, count in counts.items() if count > times}

    def _think(self) -> None:
        """What the trials say, worked out once a trial: the driver asks many times a second."""
        if not self.on_gpus:
            return
        lost = {slot: note.code == FAILING for slot, note in self.aside.items()}
        for last in (False, True):
            self._doubted[last] = thinking.doubted(self.trials, self.in_use, width=self.width, last=last)
            self._again[last] = thinking.to_repeat(self.trials, self.in_use, width=self.width, lost=lost, last=last)

    def _put_aside(self, slot: str, note: Note) -> None:
        self.aside[slot] = note
        self._short.pop(slot, None)
        self._think()
        self.tell(slot, note)

    # memory

    def _with_memory(self, free: Sequence[str]) -> list[str]:
        """Those of the free slots that have memory enough, as of a look that is not old."""
        now = self.occasion.clock()
        asked = [slot for slot in free if now - self._looked(slot) > LOOK_AGAIN]
        for slot in asked:
            self._fit.pop(slot, None)
        seen = self.occasion.look(asked) if asked else {}
        for slot in asked:
            gpu = seen.get(slot)
            self._note(slot, thinking.shortage(gpu, self.peak) if gpu else None, now)
        return [slot for slot in free if slot not in self._short and slot not in self.aside]

    def _looked(self, slot: str) -> float:
        short = self._short.get(slot)
        return short[1] if short else self._fit.get(slot, float("-inf"))

    def _note(self, slot: str, short: str | None, now: float) -> None:
        """Remember what was seen of a free slot. Memory of a cell that has just ended may take a moment to go."""
        if short is None:
            self._fit[slot] = now
            self._short.pop(slot, None)
            return
        known = self._short.get(slot)
        since = known[0] if known and now - known[1] < 10 * LOOK_AGAIN else now
        self._short[slot] = (since, now, short)
        if now - since >= self.occasion.patience:
            waited = f"GPU {slot} was put aside after {now - since:.0f} s of waiting for its memory: {short}"
            self._put_aside(slot, Note(TAKEN, waited))
        elif known and known[0] == known[1]:
            self.tell(slot, Note(BUSY, f"GPU {slot} is left to whoever has it: {short}"))

    def require(self) -> None:
        """Raises ExecutorError when too few GPUs are left for a cell, now and for good."""
        if len(self.in_use) < self.width:
            reasons = [note.text for note in self.aside.values()]
            raise ExecutorError(
                "\n".join(
                    [
                        f"{len(self.in_use)} of {len(self.slots)} GPUs are left, and a cell takes {self.width}",
                        *reasons,
                        "try: --gpus with others, or --resume when they are free; what has ended is kept",
                    ]
                )
            )
