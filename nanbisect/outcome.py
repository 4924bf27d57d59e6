"""How an attempt ended: a status plus evidence, and its JSON.

Numbers that JSON does not have are named: "nan", "+inf", "-inf". Everything here is frozen; what is
read back equals what was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from nanbisect.matrix import Cell

SCHEMA = 1
KEPT = "kept"
"""How an attempt started that shared its process, and the model loaded there, with others."""
CONTENT = "content "
"""Begins what stands for the id of a record that has none: a mark of what is in it, of use to compare only."""
WRAPPERS = re.compile(r"^module\.|(?<![^.])(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\.")


def unwrapped(name: str) -> str:
    """A parameter's name as the model has it, without what DDP, FSDP, checkpointing or compiling put around it."""
    return WRAPPERS.sub("", name)


class Status(str, Enum):
    """Every way an attempt can end. Only `finite` and `nonfinite` are judgements."""

    FINITE = "finite"
    NONFINITE = "nonfinite"
    UNSUPPORTED = "unsupported"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    NO_TRAINING = "no_training"

    @property
    def judged(self) -> bool:
        """Whether the attempt says anything about the NaN."""
        return self in (Status.FINITE, Status.NONFINITE)


def all_float32(resolved: Mapping[str, Any]) -> bool:
    """Whether the probe saw nothing but float32 parameters, and a graph of the first step that casts nothing."""
    return set(resolved.get("parameter_dtypes", ())) == {"float32"} and resolved.get("casts") == 0


@dataclass(frozen=True)
class Ranks:
    """Which of the `of` processes of a training had it `by_itself` in the step of the site, and which by reduction.

    A rank in neither ended, or was not seen, before it told.
    """

    of: int
    by_itself: tuple[int, ...] = ()
    by_reduction: tuple[int, ...] = ()


@dataclass(frozen=True)
class Site:
    """Where the first non-finite value surfaced. `step` counts from 1, `micro_batch` from 0.

    `phase` is one of load, data, forward, loss, backward, recompute, reduce, clip, optimizer; `kind`
    is nan, +inf or -inf; `parameters` are the first gradients (or tensors) to show it, in order.
    `loss` is the loss of that step, the mean over ranks; `ranks` is None where one process trained.
    `since`: the last step after which the same was finite, where steps between were not looked at.
    """

    step: int
    micro_batch: int
    rank: int
    phase: str
    kind: str
    parameters: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    loss: float | None = None
    ranks: Ranks | None = None
    since: int | None = None

    @property
    def steps(self) -> str:
        """`step 3`, or `one of steps 71 to 80`."""
        return f"step {self.step}" if self.since is None else f"one of steps {self.since + 1} to {self.step}"

    def same_place(self, other: Site | None) -> bool:
        """Whether two attempts failed at the same step, phase, first tensor, and on a rank that both name."""
        if other is None or not self._origins & other._origins:
            return False
        mine = (self.step, self.micro_batch, self.phase, self.kind, self.parameters[:1])
        return mine == (other.step, other.micro_batch, other.phase, other.kind, other.parameters[:1])

    @property
    def _origins(self) -> set[int]:
        """The ranks on which it began: of several, one may be ended before it tells."""
        return {self.rank, *(self.ranks.by_itself if self.ranks else ())}


@dataclass(frozen=True)
class Smear:
    """What a check after clipping would have blamed, beside the first gradient that really arrived bad.

    `bad` of `numel` elements of `blamed` (the name that the check prints) were non-finite after clipping.
    """

    blamed: str
    bad: int
    numel: int
    first: str

    @property
    def misleads(self) -> bool:
        """Whether the check would have named another parameter."""
        return unwrapped(self.blamed) != self.first


@dataclass(frozen=True)
class Note:
    """A silent repair or a doubt about this attempt: a stable code and a sentence."""

    code: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended. `seconds` is the whole attempt, `load` and `train` its parts.

    `loss` and `grad_norm` hold one number a step (as the optimizer saw them, before clipping);
    `channels` the first step's loss and count a channel; `first_gradients` the L2 norm of every
    parameter's gradient at step 1. `records` are the ids that training met, and `all_records` says whether
    that is all of them. `blocked` names levels that this machine can't run at all. `started`: cold, warm or
    kept, as the executor says; empty where nobody told.
    """

    status: Status
    reason: str
    attempt: int = 1
    seed: int = 0
    site: Site | None = None
    origin: Mapping[str, Any] | None = None
    smear: Smear | None = None
    loss: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    channels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    first_gradients: Mapping[str, float] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    all_records: bool = True
    suspects: tuple[str, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict)
    repairs: tuple[Note, ...] = ()
    doubts: tuple[Note, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)
    bad_input: bool = False
    seconds: float = 0.0
    load_seconds: float | None = None
    train_seconds: float | None = None
    micro_batches: int = 0
    memory_bytes: int | None = None
    log_tail: tuple[str, ...] = ()
    started: str = ""

    @property
    def named_suspects(self) -> tuple[str, ...]:
        """Those that a reader can find again."""
        return tuple(name for name in self.suspects if not name.startswith(CONTENT))

    @property
    def judged(self) -> bool:
        """Whether this attempt counts for either side."""
        return self.status.judged

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; non-finite numbers by name."""
        data = {**asdict(self), "schema": SCHEMA, "status": self.status.value}
        return jsonable(data)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_json`. Raises ValueError for another schema or a torn record."""
        values = dict(data)
        if values.pop("schema", None) != SCHEMA:
            raise ValueError(f"outcome schema is not {SCHEMA}")
        try:
            values["status"] = Status(values["status"])
            values["site"] = _site(values.get("site"))
            smear = values.get("smear")
            values["smear"] = Smear(**smear) if smear else None
            for name in ("loss", "grad_norm"):
                values[name] = tuple(number(item) for item in values.get(name, ()))
            for name in ("records", "suspects", "log_tail"):
                values[name] = tuple(values.get(name, ()))
            for name in ("repairs", "doubts"):
                values[name] = tuple(Note(**item) for item in values.get(name, ()))
            values["first_gradients"] = {k: number(v) for k, v in values.get("first_gradients", {}).items()}
            pairs = values.get("channels", {}).items()
            values["channels"] = {name: (number(pair[0]), number(pair[1])) for name, pair in pairs}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an outcome: {error}") from error


@dataclass(frozen=True)
class CellResult:
    """A cell with its attempts so far, oldest first (killed ones included)."""

    cell: Cell
    attempts: tuple[Outcome, ...] = ()

    @property
    def counting(self) -> tuple[Outcome, ...]:
        """The attempts, less those in a shared process whose seed was judged in one of its own, too."""
        own = {attempt.seed for attempt in self.attempts if attempt.judged and attempt.started != KEPT}
        return tuple(attempt for attempt in self.attempts if attempt.started != KEPT or attempt.seed not in own)

    @property
    def outcome(self) -> Outcome | None:
        """The attempt that speaks for the cell: the first non-finite, else the first finite, else the last."""
        for status in (Status.NONFINITE, Status.FINITE):
            for attempt in self.counting:
                if attempt.status is status:
                    return attempt
        return self.counting[-1] if self.counting else None

    @property
    def status(self) -> Status | None:
        """The cell's status; None when it was not run yet."""
        return self.outcome.status if self.outcome else None

    @property
    def disagree(self) -> bool:
        """Whether judged attempts ended both ways."""
        return len({attempt.status for attempt in self.counting if attempt.judged}) > 1


def _site(data: Mapping[str, Any] | None) -> Site | None:
    if not data:
        return None
    tuples = {name: tuple(data.get(name, ())) for name in ("parameters", "channels")}
    ranks = data.get("ranks")
    if ranks:
        ranks = Ranks(ranks["of"], tuple(ranks["by_itself"]), tuple(ranks["by_reduction"]))
    loss = data.get("loss")
    return Site(**{**data, **tuples, "loss": None if loss is None else number(loss), "ranks": ranks})


NAMED = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


def number(value: Any) -> float:
    """A float from JSON: a number, or one of "nan", "+inf", "-inf"."""
    return NAMED[value] if isinstance(value, str) else float(value)


def named(value: float) -> float | str:
    """The value itself if finite, else its name."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return value


def jsonable(value: Any) -> Any:
    """Mappings, sequences and enums as JSON has them; floats by `named`. Strict: anything else fails."""
    if isinstance(value, float):
        return named(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [jsonable(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")
