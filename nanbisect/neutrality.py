"""What finite cells say about each other, and the doubts about a run's cells. Pure.

Two questions beside the causes. Did a setting that must not change the mathematics change it
(`compare`)? And what weakens what the cells say (`cell_cautions`)? The types are also names of
`attribution`, which puts everything together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from nanbisect.matrix import Factor
from nanbisect.outcome import CellResult, Note, Outcome, Status, all_float32


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
class Tolerance:
    """Relative differences at step 1 that rounding explains: of the loss, the norm, one parameter's norm."""

    loss: float
    gradient: float
    parameter: float


# By the precision of autocast. A bf16 number has 8 significant bits (2e-3 an operation), an fp16 number
# 11 (2.4e-4), an fp32 number 24; what a whole model adds up is some ten times that for a loss and more
# for gradients, where terms cancel.
TOLERANCES = {
    "bf16": Tolerance(loss=2e-2, gradient=1e-1, parameter=3e-1),
    "fp16": Tolerance(loss=5e-3, gradient=3e-2, parameter=1e-1),
    "fp32": Tolerance(loss=1e-4, gradient=1e-3, parameter=1e-2),
}

SPLIT = ("batch_size", "gradient_accumulation")
"""Together they split a batch: neutral when their product stays, never alone."""

SMALL = 1e-2
"""Gradients below this part of the model's largest are compared as if they were that large: noise."""

OFTEN_IDENTICAL = frozenset(
    {
        "gradient_checkpointing",  # recomputes the very same kernels
        "deterministic",  # the default kernels may be deterministic already
        "padding_side",  # nothing may be padded, and nothing cut: whether the recipe asked for them is known
        "max_length",
        # these act in or after the first optimizer step, which the first loss and norm do not see
        "optimizer",
        "learning_rate",
        "lr_scheduler",
        "warmup_steps",
        "adam_eps",
        "weight_decay",
        "max_grad_norm",
    }
)
"""Settings for which an identical first step says nothing."""

ADVICE = {
    Status.UNSUPPORTED: "Install what is missing, or take the level out of the matrix.",
    Status.OUT_OF_MEMORY: "Shorten the records, use a larger GPU, or in trainer sft set `optimizer: none`.",
    Status.FAILED: "Read the log of one of these cells and mend what it names; `rerun` tries one of them again.",
    Status.TIMED_OUT: "Raise `--timeout` and go on with `--resume`, which tries them again.",
    Status.KILLED: "Find out who stopped them (the scheduler, the out-of-memory killer), then `--resume`.",
    Status.NO_TRAINING: "Check that the command trains, in a process that gets PYTHONPATH from the one it starts.",
}

IDLE = "Take the factor out of the matrix, or make the training use the setting."
DOUBTS = {
    "scaler_skip": "Skips in the first steps are healthy; use bf16 if they go on.",
    "aborted_at_exit": "Nothing to do, if the log of the cell says no more than that.",
    "trained_apart": "Read what the launcher says (on CPU `accelerate launch` wants ACCELERATE_USE_CPU=true).",
    "attention_otherwise": "Read the level as the training code's own name for what it does.",
    "precision_otherwise": "Read every claim as one on float32; the command may use that precision on a GPU only.",
    "fewer_steps": "Put {steps} into the command where its number of steps goes, or give it more data.",
    "unfinished": "Look in its log for a check of its own that ended it.",
    "trace_disagrees": "Run it a few times more with `rerun --repeat`: what differs is not in its seed.",
    "no_origin": "See the files of that trace, below `traces` in the run folder.",
    "comes_and_goes": "Trace it again with `rerun --trace`: two attempts are few.",
}
"""Advice for what an attempt doubted."""
RUN_NOTES = {
    "gpu_failing": "Look at it with `nvidia-smi -q` and `dmesg`, and leave it out with `--gpus`.",
    "gpu_taken": "Free it, or name the GPUs to use with `--gpus`.",
}
"""Advice for what was noted of a whole run."""


# Divergences


@dataclass(frozen=True)
class Comparison:
    """What came of comparing cells that must agree at step 1.

    `moved` is what differs by more than rounding, `pairs` how many were compared, `largest` the largest
    relative difference seen of "loss", "grad_norm" and "parameter" (one parameter's gradient norm).
    """

    moved: tuple[Divergence, ...] = ()
    pairs: int = 0
    largest: Mapping[str, float] = field(default_factory=dict)


def compare(factors: Sequence[Factor], results: Sequence[CellResult], neutral_settings: frozenset[str]) -> Comparison:
    """Compare all finite cells that differ only in what must not change the mathematics."""
    pairs = list(_pairs(factors, results, neutral_settings))
    seen = [quantity for pair in pairs for quantity in _compared(*pair)]
    largest: dict[str, float] = {}
    for quantity in seen:
        kind = quantity.quantity if quantity.quantity in ("loss", "grad_norm") else "parameter"
        largest[kind] = max(largest.get(kind, 0.0), quantity.relative)
    moved = tuple(quantity for quantity in seen if quantity.relative > quantity.tolerance)
    return Comparison(moved, len(pairs), largest)


def _pairs(
    factors: Sequence[Factor], results: Sequence[CellResult], neutral_settings: frozenset[str]
) -> Iterator[tuple[CellResult, CellResult]]:
    """Pairs that must agree: each cell with the first of its group, so that they grow with the cells only."""
    same_split = _groups(
        (result for result in results if _comparable(result)),
        [factor.name for factor in factors if factor.name not in neutral_settings or factor.name in SPLIT],
        by_batch=False,
    )
    for group in same_split:
        yield from ((group[0], other) for other in group[1:])
    other_split = _groups(
        (group[0] for group in same_split if _split_comparable(group[0])),
        [factor.name for factor in factors if factor.name not in {*neutral_settings, *SPLIT}],
        by_batch=True,
    )
    for group in other_split:
        yield from ((group[0], other) for other in group[1:])


def _groups(
    results: Iterable[CellResult], names: Sequence[str], *, by_batch: bool
) -> tuple[tuple[CellResult, ...], ...]:
    """Cells alike in these factors, in their seed and, `by_batch`, in the records of an optimizer step."""
    groups: defaultdict[tuple[object, ...], list[CellResult]] = defaultdict(list)
    for result in results:
        batch = math.prod(_split(result)) if by_batch else None
        groups[(_spoken(result).seed, batch, *(result.cell.levels[name] for name in names))].append(result)
    return tuple(tuple(group) for group in groups.values())


def _spoken(result: CellResult) -> Outcome:
    """The outcome of a cell that has one."""
    if result.outcome is None:
        raise ValueError(f"cell {result.cell.number} was not run")
    return result.outcome


def _comparable(result: CellResult) -> bool:
    """Whether the cell is finite, its first step was read, and no dropout draws other masks elsewhere."""
    outcome = result.outcome
    return (
        outcome is not None
        and outcome.status is Status.FINITE
        and bool(outcome.loss)
        and bool(outcome.grad_norm)
        and math.isfinite(outcome.loss[0])
        and math.isfinite(outcome.grad_norm[0])
        and not outcome.resolved.get("dropout")
    )


def _split_comparable(result: CellResult) -> bool:
    """Whether another split of the same batch must give the same loss.

    The mean over micro-batches of a mean over tokens is the mean over all tokens only when every
    micro-batch has equally many.
    """
    return bool(_split(result)) and bool(_spoken(result).resolved.get("valid_labels_equal"))


def _split(result: CellResult) -> tuple[int, ...]:
    """Batch size and accumulation, or nothing where one isn't known."""
    values = [_setting(result, name) for name in SPLIT]
    try:
        return tuple(int(value) for value in values)
    except (TypeError, ValueError):
        return ()


def _setting(result: CellResult, name: str) -> Any:
    """A setting's level in this cell, else what training resolved it to, else None."""
    return result.cell.levels.get(name, _spoken(result).resolved.get(name))


def _compared(first: CellResult, second: CellResult) -> Iterator[Divergence]:
    """The loss, the norm and the worst parameter of a pair, with how much they differ."""
    one, two = _spoken(first), _spoken(second)
    tolerance = max((_tolerance(outcome) for outcome in (one, two)), key=lambda loose: loose.loss)
    losses, norms = (one.loss[0], two.loss[0]), (one.grad_norm[0], two.grad_norm[0])
    worst = max(_parameters(one.first_gradients, two.first_gradients), key=lambda item: item[2], default=None)
    quantities = [
        ("loss", losses, _relative(*losses), tolerance.loss),
        ("grad_norm", norms, _relative(*norms), tolerance.gradient),
        *([(*worst, tolerance.parameter)] if worst else []),
    ]
    cells, settings = (first.cell.number, second.cell.number), _differing(first, second)
    for quantity, values, relative, allowed in quantities:
        yield Divergence(cells, settings, quantity, values, relative, allowed)


def _tolerance(outcome: Outcome) -> Tolerance:
    """By precision; the loosest where it isn't known. A GPU may round float32 as TF32, a CPU does not."""
    resolved = outcome.resolved
    seen = "fp32" if resolved.get("device") == "cpu" and all_float32(resolved) else "bf16"
    return TOLERANCES.get(str(resolved.get("precision")), TOLERANCES[seen])


def _parameters(one: Mapping[str, float], two: Mapping[str, float]) -> Iterator[tuple[str, tuple[float, float], float]]:
    """(name, both norms, relative difference) of every parameter that both cells have."""
    floor = SMALL * max((abs(norm) for norms in (one, two) for norm in norms.values()), default=0.0)
    for name in (name for name in one if name in two):
        yield name, (one[name], two[name]), _relative(one[name], two[name], floor)


def _relative(a: float, b: float, floor: float = 0.0) -> float:
    """|a - b| / max(|a|, |b|, floor); 0 where both are 0."""
    scale = max(abs(a), abs(b), floor)
    return abs(a - b) / scale if scale else 0.0


def _differing(first: CellResult, second: CellResult) -> tuple[str, ...]:
    """The settings in which two cells differ, in matrix order."""
    names = dict.fromkeys([*first.cell.levels, *SPLIT])
    return tuple(name for name in names if str(_setting(first, name)) != str(_setting(second, name)))


# Cautions


def cell_cautions(
    factors: Sequence[Factor], results: Sequence[CellResult], neutral_settings: frozenset[str]
) -> tuple[Caution, ...]:
    """Every doubt that lies in the cells themselves, whatever the causes. `results` by cell number."""
    return (
        *_baseline(factors, results),
        *_not_judged(factors, results),
        *_not_run(results),
        *_attempts(results),
        *_identical_bits(factors, results, neutral_settings),
        *_doubts(results),
    )


def run_cautions(notes: Iterable[Note]) -> tuple[Caution, ...]:
    """What was noted of a whole run, with advice."""
    return tuple(Caution(note.code, f"{note.text.rstrip('.')}.", RUN_NOTES.get(note.code, "")) for note in notes)


def listed(items: Sequence[object], most: int = 6) -> str:
    """`3, 5 and 8`; of a long list the first `most`, and how many more."""
    words = [str(item) for item in items]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def cells_of(results: Sequence[CellResult]) -> str:
    """`cell 3`, `cells 3 and 5`."""
    return f"{'cell' if len(results) == 1 else 'cells'} {_numbers(results)}"


def _numbers(results: Sequence[CellResult]) -> str:
    return listed([result.cell.number for result in results])


def _baseline(factors: Sequence[Factor], results: Sequence[CellResult]) -> Iterator[Caution]:
    """The baseline is the control: without a finite one, every comparison starts on sand."""
    safe = {factor.name: factor.safe for factor in factors}
    baseline = next((result for result in results if result.cell.levels == safe), None)
    if baseline is not None and baseline.status is Status.NONFINITE:
        yield Caution(
            "baseline_not_finite",
            f"The baseline (cell {baseline.cell.number}, all first levels) is non-finite: "
            "the levels listed as safe are not.",
            "Put a level that stays finite first in each factor, and look at the site of the baseline's NaN.",
        )
    elif baseline is None or baseline.status is not Status.FINITE:
        ended = "is not in the matrix" if baseline is None else f"was not judged ({_status(baseline)})"
        yield Caution(
            "baseline_not_judged",
            f"The baseline (all first levels) {ended}: nothing shows that the safe levels are finite.",
            "Make the baseline run before you trust the rest.",
        )


def _status(result: CellResult) -> str:
    """The status in words."""
    return result.status.value.replace("_", " ") if result.status else "not run"


def _not_judged(factors: Sequence[Factor], results: Sequence[CellResult]) -> Iterator[Caution]:
    """One caution a status, with the level that explains it where one does."""
    for status, advice in ADVICE.items():
        cells = [result for result in results if result.status is status]
        if cells:
            words = status.value.replace("_", " ")
            held = "".join(f" {part}" for part in _common(factors, cells, words))
            verb = "was" if len(cells) == 1 else "were"
            text = f"{len(cells)} of {len(results)} cells {verb} not judged: {words}.{held}"
            idle = all("did not take effect" in _spoken(result).reason for result in cells)
            yield Caution("not_judged", text, IDLE if idle else advice)


def _common(factors: Sequence[Factor], cells: Sequence[CellResult], words: str) -> Iterator[str]:
    """Which cells these are, if one level or the cells' numbers say it."""
    levels = [{result.cell.levels[factor.name] for result in cells} for factor in factors]
    common = [
        f"{factor.name}={next(iter(seen))}" for factor, seen in zip(factors, levels, strict=True) if len(seen) == 1
    ]
    if len(cells) > 1 and common:
        yield f"All {len(cells)} {words} cells hold {listed(common)}."
    else:
        yield f"See {cells_of(cells)}."


def _not_run(results: Sequence[CellResult]) -> Iterator[Caution]:
    """What was never tried is no evidence."""
    cells = [result for result in results if result.status is None]
    if cells:
        verb = "was" if len(cells) == 1 else "were"
        text = f"{len(cells)} of {len(results)} cells {verb} not run ({cells_of(cells)})."
        yield Caution("not_run", text, "Run them with `--resume`.")


def _attempts(results: Sequence[CellResult]) -> Iterator[Caution]:
    """One attempt can be luck; two that disagree were."""
    judged = [(result, sum(attempt.judged for attempt in result.counting)) for result in results]
    single = [result for result, attempts in judged if attempts == 1]
    if single:
        total = sum(attempts > 0 for _, attempts in judged)
        which = "Every judged cell" if len(single) == total else f"{len(single)} of {total} judged cells"
        rest = "rest" if len(single) > 1 and len(single) != total else "rests"
        text = f"{which} {rest} on one attempt: a NaN that comes and goes can hide in a finite cell."
        yield Caution("single_attempt", text, "Use `--repeat 3` if the NaN does not come every time.")
    disagree = [result for result in results if result.disagree]
    if disagree:
        verb = "was" if len(disagree) == 1 else "were each"
        text = (
            f"Attempts disagree: {cells_of(disagree)} {verb} finite in one attempt and non-finite in "
            "another. They count as non-finite."
        )
        yield Caution("attempts_disagree", text, "Raise `--repeat`: other finite cells may fail as rarely.")


def _identical_bits(
    factors: Sequence[Factor], results: Sequence[CellResult], neutral_settings: frozenset[str]
) -> Iterator[Caution]:
    """Levels that gave the same first loss and norm to the last bit, in every pair that can be compared.

    Where one level failed and the other did not, the setting has reached the training all the same.
    """
    finite = [result for result in results if _comparable(result)]
    judged = [result for result in results if result.outcome is not None and result.outcome.judged]
    for factor in factors:
        if factor.name in neutral_settings | OFTEN_IDENTICAL:
            continue
        apart = {names for names, low, high in _alone(factors, judged, factor) if low.status is not high.status}
        same: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
        for names, low, high in _alone(factors, finite, factor):
            same[names].append(_first_step(low) == _first_step(high))
        for (low_name, high_name), equal in same.items():
            if all(equal) and (low_name, high_name) not in apart:
                pairs = "1 pair" if len(equal) == 1 else f"{len(equal)} pairs"
                yield Caution(
                    "identical_bits",
                    f"{factor.name}={low_name} and {factor.name}={high_name} gave bit-identical first losses and "
                    f"gradient norms in {pairs} of cells: the setting may not have reached the training.",
                    f"Check in a cell's log that {factor.name} is what the matrix says.",
                )


def _alone(
    factors: Sequence[Factor], results: Sequence[CellResult], factor: Factor
) -> Iterator[tuple[tuple[str, str], CellResult, CellResult]]:
    """Pairs of cells that differ in this factor alone, with their two levels, in the factor's order."""
    others = [other.name for other in factors if other.name != factor.name]
    for row in _groups(results, others, by_batch=False):
        ordered = sorted(row, key=lambda result: factor.levels.index(result.cell.levels[factor.name]))
        for low, high in combinations(ordered, 2):
            yield (low.cell.levels[factor.name], high.cell.levels[factor.name]), low, high


def _first_step(result: CellResult) -> tuple[float, float]:
    """Loss and gradient norm of the first step."""
    outcome = _spoken(result)
    return outcome.loss[0], outcome.grad_norm[0]


def _doubts(results: Sequence[CellResult]) -> Iterator[Caution]:
    """The attempts' own doubts, one caution a code."""
    cells: defaultdict[str, dict[int, CellResult]] = defaultdict(dict)
    sample: dict[str, Note] = {}
    for result in results:
        for note in (note for attempt in result.attempts if attempt.judged for note in attempt.doubts):
            cells[note.code][result.cell.number] = result
            sample.setdefault(note.code, note)
    for code, note in sample.items():
        doubted = tuple(cells[code].values())
        where = cells_of(doubted) if len(doubted) == 1 else f"{len(doubted)} cells ({_numbers(doubted)})"
        advice = DOUBTS.get(code, "Read the log of one of these cells.")
        yield Caution(code, f"In {where}: {note.text.rstrip('.')}.", advice)
