"""Outcomes in, causes out. Pure: no clock, file, environment or randomness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nanbisect.matrix import Factor, Setting
from nanbisect.outcome import CellResult, Status


class Standing(str, Enum):
    """How much is known of a combination of levels that fails wherever it was judged."""

    PROVED = "proved"
    SUPPORTED = "supported"
    NOT_TOLD_APART = "not_told_apart"


class Finding(str, Enum):
    """What the judged cells say as a whole."""

    CAUSE = "cause"                        # at least one proved or supported cause
    UNDECIDED = "undecided"                # some failed, but no combination may be called a cause
    NOTHING_FAILED = "nothing_failed"
    EVERYTHING_FAILED = "everything_failed"
    NOTHING_JUDGED = "nothing_judged"


@dataclass(frozen=True)
class Cause:
    """A minimal combination of levels; levels of one factor that act alike are merged.

    `matching` counts the matrix's cells that hold it, `failed` those that were non-finite, `untested`
    those not judged. `needed[factor][other level]` is what happened when only that part was changed:
    finite, nonfinite, mixed, a not-judged status, or not_run. `witnesses` are numbers of finite cells
    that lack exactly one part. `unseen[factor]` are levels never judged together with it.
    `alternatives` (only for not_told_apart) are combinations that explain the same failures, and
    `deciding` the numbers of the cells that would tell them apart.
    """

    levels: Mapping[str, tuple[str, ...]]
    standing: Standing
    matching: int
    failed: int
    untested: int
    needed: Mapping[str, Mapping[str, str]]
    witnesses: tuple[int, ...] = ()
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alternatives: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    deciding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """Two finite cells that must compute the same thing at step 1, and did not.

    `cells` are their numbers, `settings` the neutral settings they differ in, `quantity` is "loss",
    "grad_norm" or a parameter's name, `values` its value in each, `tolerance` the relative difference
    that rounding explains.
    """

    cells: tuple[int, int]
    settings: tuple[str, ...]
    quantity: str
    values: tuple[float, float]
    relative: float
    tolerance: float


@dataclass(frozen=True)
class Caution:
    """A doubt, printed next to the claim it weakens, with advice."""

    code: str
    text: str
    advice: str


@dataclass(frozen=True)
class Attribution:
    """Everything the judged cells show."""

    finding: Finding
    causes: tuple[Cause, ...]
    neutral: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    compared: int
    cautions: tuple[Caution, ...]
