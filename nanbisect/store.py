"""The run folder: what is in it and how it is written. The only module that knows file names.

    <run>/run.json                                  the matrix as read, arguments, environment
    <run>/search.json                               how the cells are chosen, where not all of them run
    <run>/notes.jsonl                               what is to be said of the whole run, such as a GPU put aside
    <run>/cells/<slug>-<8 hex>/attempt-1/           attempt.json (seed, levels), outcome.json, exit.json, log.txt,
                                                    events.*.jsonl, trainer.jsonl
    <run>/variants/<slug>-<8 hex>/attempt-1/        the same, for `rerun --with`
    <run>/traces/<slug>-<8 hex>/attempt-1/          the same, for traced attempts, which count for nothing
    <run>/results.csv, result.json, report.md

Files that must not be torn are written to a temporary name, synced and moved into place. A run can be
killed at any moment: an attempt without an outcome is judged from what it left behind.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanbisect.cells import Cells
from nanbisect.errors import StoreError
from nanbisect.evidence import Ending, Evidence, Line, log_tail, says_port_taken
from nanbisect.executors.base import Exit, read_exit, started_as
from nanbisect.matrix import Cell
from nanbisect.outcome import Note, Outcome, Status, jsonable
from nanbisect.ranks import of_process

SCHEMA = 1
RUN, RESULT, CSV, REPORT, LOCK = "run.json", "result.json", "results.csv", "report.md", ".lock"
NOTES = "notes.jsonl"
SEARCH = "search.json"
SCRATCH, TRACES = "warm-check", "traces"
IGNORE, IGNORE_ALL = ".gitignore", "*\n"
ABOUT, OUTCOME, LOG, DIARY = "attempt.json", "outcome.json", "log.txt", "trainer.jsonl"
ARMED, REACHED = "armed.jsonl", "reached"
TAIL_BYTES = 1 << 16
LARGE, ENDS = 1 << 26, 1 << 20
PROBE = Path(__file__).parent / "probe"
ATTEMPT = re.compile(r"^attempt-(\d+)$")


class Store:
    """One run folder, made or opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # a training has a working folder of its own
        self.made = False

    def __str__(self) -> str:
        """The folder as a person would type it from here."""
        here = Path.cwd()
        return str(self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder)

    @staticmethod
    def require_free(folder: Path) -> None:
        """Raises StoreError if a run can't be made there, since something is."""
        with explained(folder):
            if folder.exists() and any(not _ours(entry) for entry in folder.iterdir()):
                raise StoreError(f"{folder} is not empty\ntry: another --out, or --resume if it is an unfinished run")

    @classmethod
    def create(cls, folder: Path, run: Mapping[str, Any]) -> Store:
        """Make the folder with its `run.json`. Raises StoreError if it is in use or can't be made."""
        cls.require_free(folder)
        with explained(folder):
            store = cls(folder)
            store.made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / IGNORE).write_text(IGNORE_ALL, encoding="utf-8")
            store.write_run(run)
        return store

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open an existing run. Raises StoreError if the folder is not one."""
        store = cls(folder)
        store.run()
        return store

    def run(self) -> dict[str, Any]:
        """`run.json`. Raises StoreError if it is missing, torn or of another schema."""
        path = self.folder / RUN
        if not path.is_file():
            raise StoreError(
                f"{self.folder} is not a run folder: it has no {RUN}\ntry: a folder below reports/, or `latest`"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} can't be read: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise StoreError(f"{path} is of another version of nanbisect")
        return data

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write `run.json`."""
        self._write(RUN, json.dumps(jsonable({"schema": SCHEMA, **run}), indent=1, allow_nan=False))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One driver a run folder. Raises StoreError when another one is at work."""
        with explained(self.folder), (self.folder / LOCK).open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another nanbisect is at work in {self.folder}\ntry: wait for it, or another --out"
                ) from None
            yield

    # attempts ----------------------------------------------------------------------------------

    def cell_folder(self, cell: Cell, *, variant: bool = False) -> Path:
        """Where a cell's attempts are."""
        return self.folder / ("variants" if variant else "cells") / cell.slug

    def attempt_folders(self, cell: Cell, *, variant: bool = False) -> list[Path]:
        """A cell's attempt folders, oldest first."""
        folder = self.cell_folder(cell, variant=variant)
        found = [(int(match[1]), path) for path in _listed(folder) if (match := ATTEMPT.match(path.name))]
        return [path for _, path in sorted(found)]

    def new_attempt(self, cell: Cell, *, variant: bool = False) -> tuple[int, Path]:
        """The number and the new, empty folder of the next attempt."""
        taken = self.attempt_folders(cell, variant=variant)
        number = int(taken[-1].name.partition("-")[2]) + 1 if taken else 1
        path = self.cell_folder(cell, variant=variant) / f"attempt-{number}"
        with explained(path):
            path.mkdir(parents=True)
        return number, path

    def new_trace(self, cell: Cell) -> Path:
        """The new, empty folder of a traced attempt."""
        home = self.folder / TRACES / cell.slug
        taken = [int(match[1]) for path in _listed(home) if (match := ATTEMPT.match(path.name))]
        path = home / f"attempt-{max(taken, default=0) + 1}"
        with explained(path):
            path.mkdir(parents=True)
        return path

    def failed_attempt(self, cell: Cell, *, variant: bool = False) -> tuple[Path, Outcome] | None:
        """The first non-finite attempt of a cell, which speaks for it."""
        for folder in self.attempt_folders(cell, variant=variant):
            outcome = self.outcome(folder)
            if outcome is not None and outcome.status is Status.NONFINITE:
                return folder, outcome
        return None

    def write_about(self, folder: Path, cell: Cell, *, seed: int, order: int, why: str) -> None:
        """Note what an attempt is before it starts: a command never says its seed, and its driver may die.

        `order` counts the attempts of a run in the order of their starts, `why` says what this one is for.
        """
        about = {"schema": SCHEMA, "seed": seed, "order": order, "why": why, "levels": cell.levels}
        self._write(folder.relative_to(self.folder) / ABOUT, json.dumps(jsonable(about)))

    def about(self, folder: Path) -> dict[str, Any]:
        """What was noted of an attempt; nothing for one that was never started. Older runs have the seed only."""
        data = _read_json(folder / ABOUT)
        return data if isinstance(data.get("seed"), int) else {}

    def cells(self, space: Cells) -> tuple[Cell, ...]:
        """The cells that were begun, by number. Older runs did not note levels: there the folder's name tells."""
        folders = _listed(self.folder / "cells")
        noted = {folder.name: self._levels(folder) for folder in folders}
        found = [space.cell(levels) for levels in noted.values() if levels and space.has(levels)]
        bare = {name for name, levels in noted.items() if not levels}
        found += [cell for cell in space.every if cell.slug in bare] if bare and space.listed else []
        return tuple(sorted(found, key=lambda cell: cell.number))

    def order(self) -> dict[tuple[str, int], int]:
        """(Cell's id, number of the attempt) -> its place in the order of starts, where that was noted."""
        found = {}
        for path in (self.folder / "cells").glob("*/attempt-*"):
            about = self.about(path)
            if "order" in about and (match := ATTEMPT.match(path.name)):
                found[(Cell(0, about["levels"]).id, int(match[1]))] = about["order"]
        return found

    def _levels(self, folder: Path) -> Mapping[str, str]:
        noted = (self.about(attempt).get("levels") for attempt in _listed(folder))
        return next((levels for levels in noted if isinstance(levels, dict)), {})

    def write_search(self, search: Mapping[str, Any] | None) -> None:
        """Write how the cells of this run are chosen, and why it ended; None: all of them run, as in any grid."""
        if search is None:
            (self.folder / SEARCH).unlink(missing_ok=True)
        else:
            self._write(SEARCH, json.dumps(jsonable({"schema": SCHEMA, **search}), indent=1))

    def search(self) -> dict[str, Any]:
        """How the cells of this run are chosen; nothing where all of them run."""
        return _read_json(self.folder / SEARCH)

    def outcomes(self, cell: Cell, *, variant: bool = False) -> tuple[Outcome, ...]:
        """The outcomes on disk, oldest attempt first. Torn ones are judged again by the driver."""
        folders = self.attempt_folders(cell, variant=variant)
        return tuple(outcome for folder in folders if (outcome := self.outcome(folder)) is not None)

    def outcome(self, folder: Path) -> Outcome | None:
        """The outcome of an attempt's folder; None if it is missing or torn."""
        try:
            return Outcome.from_json(json.loads((folder / OUTCOME).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def write_outcome(self, folder: Path, outcome: Outcome) -> None:
        """Write an attempt's outcome; from here on the attempt is finished."""
        self._write(folder.relative_to(self.folder) / OUTCOME, json.dumps(outcome.to_json(), indent=1, allow_nan=False))

    def write_report(self, *, markdown: str, csv: str, result: Mapping[str, Any]) -> None:
        """Write the three renderings of the whole run."""
        self._write(REPORT, markdown)
        self._write(CSV, csv)
        self._write(RESULT, json.dumps(jsonable(result), indent=1, allow_nan=False))

    def scratch(self) -> Path:
        """A folder for an attempt that counts for nothing."""
        folder = self.folder / SCRATCH
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def add_note(self, note: Note) -> None:
        """Keep what is to be said of the whole run, once."""
        if note not in self.notes():
            with explained(self.folder / NOTES), (self.folder / NOTES).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps({"code": note.code, "text": note.text}) + "\n")

    def notes(self) -> tuple[Note, ...]:
        """What is to be said of the whole run, oldest first."""
        return tuple(Note(line["code"], line["text"]) for line in read_lines(self.folder / NOTES))

    def discard(self) -> None:
        """Remove what `create` made of a run that never began (a bad input found by its first cell)."""
        for name in ("cells", "variants", TRACES):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (RUN, NOTES, SEARCH, IGNORE, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        if self.made:
            with contextlib.suppress(OSError):  # somebody put something into it
                self.folder.rmdir()

    def _write(self, name: str | Path, text: str) -> None:
        path = self.folder / name
        with explained(path):
            atomic_write(path, text)


def _ours(entry: Path) -> bool:
    """What a run that died at its birth leaves: its lock, its .gitignore, a temporary file."""
    if entry.name == IGNORE:
        return entry.read_text(encoding="utf-8", errors="replace") == IGNORE_ALL
    return entry.name == LOCK or (entry.name.startswith(f".{RUN}.") and entry.name.endswith(".tmp"))


def read_evidence(folder: Path, ended: Exit | None = None) -> Evidence:
    """Everything an attempt left behind. Torn last lines are dropped; a missing `exit.json` means killed."""
    ended = ended or read_exit(folder) or Exit(why="lost", started=started_as(folder))
    ending = Ending(ended.why, ended.code, ended.signal, ended.seconds, ended.oom_kill, ended.stragglers, ended.started)
    files = [read_lines(path) for path in sorted(folder.glob("events.*.jsonl"))]
    log = _tail(folder / LOG)
    return Evidence(
        ending=ending,
        probe=tuple(
            sorted((line for lines in files for line in of_process(lines)), key=lambda line: line.get("time", 0.0))
        ),
        diary=tuple(read_lines(folder / DIARY)),
        armed=(folder / ARMED).is_file(),
        reached=(folder / REACHED).is_file(),
        lost=not all(whole(lines) for lines in files),
        log_tail=log_tail(log),
        port_taken=says_port_taken(log),
    )


def read_lines(path: Path) -> list[Line]:
    """JSON lines; what is torn (its process died in it, or the disk was full) is left out."""
    lines: list[Line] = []
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as handle:
        for text in handle:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    lines.append(line)
    return lines


def whole(lines: Sequence[Line]) -> bool:
    """Whether a file of the probe's events has every line, each with the fields of the schema."""
    table = probe_events()
    numbered = [line.get("n") for line in lines] == list(range(len(lines)))
    return numbered and all(set(line) == {"kind", "n", "time", *table.get(str(line.get("kind")), ())} for line in lines)


@functools.cache
def probe_events() -> Mapping[str, Mapping[str, str]]:
    """The probe's table of events, read as data: nothing of ours imports the probe."""
    tree = ast.parse((PROBE / "schema.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "EVENTS" and node.value is not None:
            table: Mapping[str, Mapping[str, str]] = ast.literal_eval(node.value)
            return table
    raise StoreError(f"{PROBE / 'schema.py'} has no table of events")


def find_run(name: str, reports: Path) -> Path:
    """A run by path, by name below `reports`, or `latest`. Raises StoreError when there is none."""
    if name == "latest":
        runs = [path for path in _listed(reports) if (path / RUN).is_file()]
        if not runs:
            raise StoreError(f"no run below {reports}\ntry: nanbisect run MATRIX first, or the path of a run folder")
        return max(runs, key=lambda path: (path / RUN).stat().st_mtime)
    for path in (Path(name), reports / name):
        if path.is_dir():
            return path
    raise StoreError(f"there is no run {name!r}\ntry: the path of a run folder, its name below {reports}, or `latest`")


def fingerprint(path: Path) -> str:
    """A file's or folder's mark, to notice that it changed: names, sizes, and the bytes of what is small.

    Of a file above 64 MiB (weights) the first and last MiB stand for the rest.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
    with explained(path, "read"):
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path) if file != path else ''} {size}".encode())
            with file.open("rb") as handle:
                digest.update(handle.read(LARGE if size <= LARGE else ENDS))
                if size > LARGE:
                    handle.seek(-ENDS, os.SEEK_END)
                    digest.update(handle.read())
    return digest.hexdigest()[:16]


def atomic_write(path: Path, text: str) -> None:
    """Temporary file, fsync, replace, fsync of the folder: the file is whole or absent, never torn."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def explained(path: Path, verb: str = "written") -> Iterator[None]:
    """OSErrors of the file system in the user's words."""
    try:
        yield
    except OSError as error:
        mend = {
            errno.ENOSPC: "the disk is full\ntry: make room, then go on with --resume",
            errno.EDQUOT: "the quota is used up\ntry: make room, then go on with --resume",
            errno.EACCES: "no permission\ntry: --out with a folder that you may write",
            errno.EROFS: "the file system is read-only\ntry: --out with a folder that you may write",
        }.get(error.errno or 0, error.strerror or str(error))
        raise StoreError(f"{path} can't be {verb}: {mend}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where it is missing or torn."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - TAIL_BYTES))
            return handle.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
