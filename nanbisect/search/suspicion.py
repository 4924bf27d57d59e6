"""Which part of a failing cell makes it fail: how likely each combination of its levels is the cause.

Every combination has a prior chance, all of one size together a half. It is out if a finite cell holds it
(loses weight by each finite attempt, where failures come and go), and gains by other failing cells that hold
it, the more so the less likely those fail for another reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nanbisect.search.index import Floats, Index, Ints
from nanbisect.search.values import Combination, Row
from nanbisect.search.view import View

PRIOR = 0.5
LARGER = 1e-4
"""The prior chance that the cause has more factors than any combination in the index."""
CERTAIN, CERTAIN_IF_FLAKY = 0.95, 0.9


@dataclass(frozen=True)
class Suspicion:
    """The combinations in a failing cell that may be its cause, their weights, and that of something larger.

    `elsewhere` is for every combination the chance, as -log(1 - chance), that it is a cause of its own;
    those within the cell count nothing.
    """

    cell: Row
    suspects: Ints
    weights: NDArray[np.float64]
    larger: float
    elsewhere: Floats

    @property
    def lost(self) -> bool:
        """Whether something larger than any suspect is more likely than all of them."""
        return not len(self.suspects) or self.larger > 0.5

    def best(self, index: Index) -> tuple[Combination, float]:
        """The likeliest combination and its weight."""
        top = int(np.argmax(self.weights))
        return index.combination(int(self.suspects[top])), float(self.weights[top])


@lru_cache(maxsize=8)
def _prior(index: Index) -> Floats:
    prior: Floats = (PRIOR / index.of_size[index.size]).astype(np.float32)
    return prior


def suspect(view: View, cell: Row) -> Suspicion:
    """The suspects of one failing cell that no claim explains."""
    evidence, inside = view.evidence, view.numbers(cell)
    weight = _prior(view.index) * ((1 - evidence.p) ** evidence.ok)
    weight[view.refuted | view.covered] = 0
    elsewhere = -np.log1p(-np.minimum(weight, 0.999))
    elsewhere[inside] = 0
    alive = weight[inside] > 0
    suspects = inside[alive]
    logs = np.log(np.append(weight[suspects], LARGER))
    others = [other for other in view.unexplained() if other != cell]
    if others:
        numbers = np.array([view.numbers(other) for other in others])
        bad = np.array([evidence.cells[other].bad for other in others])
        chance = bad * np.log(np.maximum(-np.expm1(-elsewhere[numbers].sum(1)), 1e-9))
        logs[-1] += chance.sum()
        logs[:-1] += chance @ (numbers[:, alive] != suspects)  # a suspect has the same column in every cell
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    return Suspicion(cell, suspects, weights[:-1], float(weights[-1]), elsewhere.astype(np.float32))


def entropy(chance: Floats) -> Floats:
    """Of a yes or no, in bits."""
    p = np.clip(chance, 1e-7, 1 - 1e-7)
    found: Floats = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return found


def information(view: View, suspicion: Suspicion) -> Floats:
    """How many bits every row of the pool is expected to tell about the cause of the cell."""
    p = view.evidence.p
    weight = np.zeros(view.index.total, np.float32)
    weight[suspicion.suspects] = suspicion.weights
    held: Floats = np.minimum(view.pool.sum(weight), 1)
    other: Floats = -np.expm1(-view.pool.sum(suspicion.elsewhere))
    fails: Floats = (1 - (1 - p) * (1 - other)).astype(np.float32)
    found: Floats = entropy(held * fails + (1 - held) * other) - held * entropy(fails) - (1 - held) * entropy(other)
    return np.where(view.free & ~view.claimed, found, -1)
