"""The protocol of trainers, and the trainers by name.

A trainer turns a cell into a process: argv, environment and working folder. The driver never asks
which trainer it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nanbisect.errors import UsageError
from nanbisect.evidence import Effect
from nanbisect.executors.base import WarmStart
from nanbisect.matrix import Cell, Matrix, Vocabulary

PROBE = Path(__file__).parent.parent / "probe"
FOLDER = "NANBISECT_PROBE"  # the variable that names the folder of events, in every process below


@dataclass(frozen=True)
class Launch:
    """How to start one process. `env` is added to the environment that the executor builds.

    `from_hub`: the model is fetched by name; once a cell has it, further cells ask nobody, so that all
    get the same one. `warm`: how the same process may start from one that has imported its libraries.
    """

    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    from_hub: bool = False
    warm: WarmStart | None = None


class Trainer(Protocol):
    """What executes the training steps of a cell."""

    vocabulary: Vocabulary

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """The process of one attempt; may write what that process reads into `folder`."""

    def check(self, matrix: Matrix, *, folder: Path) -> Launch:
        """The process that looks at this machine, the recipe and the data, and writes `check.json` into `folder`."""

    def levels(self, matrix: Matrix, *, folder: Path, python: str | None = None) -> Launch | None:
        """The process that looks only at what this machine lacks for the levels: it needs no model, data or script.

        Its first word is the Python that trains; `python` is that of a command that does not show it. None
        where that is not known.
        """

    def effect(self, matrix: Matrix, cell: Cell, resolved: Mapping[str, Any]) -> Effect:
        """Whether the cell's settings became what was asked for."""

    def work(self, matrix: Matrix, cells: Sequence[Cell]) -> Mapping[str, float]:
        """How much each cell has to do, by its id: its number of micro-batches."""

    def steps_for(self, matrix: Matrix, levels: Mapping[str, str]) -> int:
        """The matrix's `steps`, or as many as a cell of these levels needs that stands outside the matrix."""

    def keep(self, matrix: Matrix, cell: Cell) -> str:
        """What cells that may share one process with its model loaded have in common; empty where none may."""

    def inputs(self, matrix: Matrix) -> Mapping[str, Path]:
        """Files and folders whose change makes another experiment: recipe, data, model, as far as they are local."""


def together(*looks: Callable[[], object]) -> None:
    """Look at everything, and raise UsageError once with all that is wrong."""
    said = []
    for look in looks:
        try:
            look()
        except UsageError as error:
            said.append(str(error))
    if said:
        raise UsageError("\n".join(said))


def probe_environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that put the probe into every Python process below, with events in `folder`."""
    paths = [str(PROBE / "site"), *filter(None, inherited.get("PYTHONPATH", "").split(":"))]
    return {"PYTHONPATH": ":".join(paths), FOLDER: str(folder)}
