"""The fake executor: attempts end as a script says, on a clock that only polling moves.

Shipped code, not a test's patch: it runs the whole pipeline (search, schedule, store, report) in
milliseconds, and records what a scheduler must not get wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM

from nanbisect.executors.base import EXIT_FILE, Exit, Handle, Task


@dataclass(frozen=True)
class Scripted:
    """How one attempt goes: after `seconds` it ends with `exit` and has written `files` (name -> text).

    The exit's own `seconds` are replaced by the time that really passed on the clock. A task whose timeout
    is shorter ends timed out, without files, as a real one would.
    """

    exit: Exit = field(default_factory=lambda: Exit("exited", code=0))
    seconds: float = 1.0
    files: Mapping[str, str] = field(default_factory=dict)


class Clock:
    """Virtual seconds. Call it for the time; `sleep` returns at once, later."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Lets the time pass."""
        self.now += seconds


@dataclass
class _Attempt:
    scripted: Scripted
    began: float
    stopped: bool = False
    exit: Exit | None = None


class ScriptedExecutor:
    """Plays `script(task)` for every task. Each poll of an attempt moves the clock by `tick` seconds.

    `starts` holds the tasks in the order of their starts, `most_at_once` the largest number of attempts
    that were under way together, and `slots` the same for every slot by its name.
    """

    def __init__(self, script: Callable[[Task], Scripted], *, clock: Clock | None = None, tick: float = 0.1) -> None:
        self.script = script
        self.clock = clock or Clock()
        self.tick = tick
        self.starts: list[Task] = []
        self.most_at_once = 0
        self.slots: dict[str, int] = {}
        self._attempts: dict[Handle, _Attempt] = {}

    def start(self, task: Task) -> Handle:
        """Asks the script, writes nothing yet."""
        self.starts.append(task)
        handle = Handle(task, f"scripted {len(self.starts)}")
        self._attempts[handle] = _Attempt(self.script(task), self.clock.now)
        running = self._running()
        self.most_at_once = max(self.most_at_once, len(running))
        for slot in task.slot:
            users = sum(slot in other.task.slot for other in running)
            self.slots[slot] = max(self.slots.get(slot, 0), users)
        return handle

    def poll(self, handle: Handle) -> Exit | None:
        """Moves the clock while the attempt runs; writes its files and its exit when it is over."""
        attempt = self._attempts[handle]
        if attempt.exit is None:
            self.clock.sleep(self.tick)
            attempt.exit = self._end(handle.task, attempt)
        return attempt.exit

    def wait(self, handles: Sequence[Handle], seconds: float) -> None:
        """No wait: polling moves the clock."""

    def stop(self, handle: Handle) -> None:
        """The next poll says cancelled."""
        self._attempts[handle].stopped = True

    def recover(self, run: Path) -> int:
        """Nothing outlives a fake."""
        return 0

    def remarks(self) -> list[str]:
        """Nothing."""
        return []

    def describe(self) -> str:
        """Where attempts run: nowhere."""
        return "a script"

    def close(self) -> None:
        """Cancels what is under way."""
        for handle in self._running():
            self.stop(handle)
            self.poll(handle)

    def _running(self) -> list[Handle]:
        return [handle for handle, attempt in self._attempts.items() if attempt.exit is None]

    def _end(self, task: Task, attempt: _Attempt) -> Exit | None:
        elapsed, scripted = self.clock.now - attempt.began, attempt.scripted
        limit = task.timeout if task.timeout is not None and task.timeout < scripted.seconds else None
        if attempt.stopped:
            exit = Exit("cancelled", signal=SIGTERM)
        elif limit is not None and elapsed >= limit:
            exit = Exit("timed_out", signal=SIGTERM)
        elif limit is None and elapsed >= scripted.seconds:
            exit = scripted.exit
            for name, text in scripted.files.items():
                path = task.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        else:
            return None
        exit = replace(exit, seconds=elapsed)
        if exit.why != "lost":  # a real one is lost because it left none
            (task.folder / EXIT_FILE).write_text(json.dumps(exit.to_json()), encoding="utf-8")
        return exit
