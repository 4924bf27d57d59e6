"""What the failing cells are put down to, given the evidence: the claims, and the cells that are still open."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanbisect.search.larger import Wanted, larger_cause
from nanbisect.search.suspicion import CERTAIN, CERTAIN_IF_FLAKY, Suspicion, information, suspect
from nanbisect.search.values import Combination, Row
from nanbisect.search.view import View

LITTLE = 1e-3
"""A cell that tells fewer bits than this is not worth running to tell suspects apart."""


@dataclass
class Reading:
    """The view with its claims, and what is open: cells with their suspects, cells wanted by `larger`.

    `vague` are claims that no cell left to run could tell from others.
    """

    view: View
    open: list[Suspicion] = field(default_factory=list)
    wanted: list[tuple[Row, Row]] = field(default_factory=list)
    vague: list[Combination] = field(default_factory=list)

    @property
    def unsettled(self) -> list[Row]:
        """The failing cells that are not explained yet."""
        return [*(suspicion.cell for suspicion in self.open), *(cell for cell, _ in self.wanted)]


def read(view: View) -> Reading:
    """Goes through the failing cells in the order in which they failed; `view` gets the claims.

    A claim may explain, or settle, a cell that was open before: then what is open is gone through again. Without a
    finite cell nothing is claimed.
    """
    reading = Reading(view)
    if not view.evidence.finite:
        reading.open = [suspect(view, cell) for cell in view.evidence.failing]
        return reading
    while True:
        claims = view.claims
        for cell in view.evidence.failing:
            if not view.explained(cell):
                _settle(reading, cell)
        if view.claims is claims or not (reading.open or reading.wanted):
            return reading
        reading = Reading(view, vague=reading.vague)


def _settle(reading: Reading, cell: Row) -> None:
    """Claims a cause for one failing cell, or notes what is open."""
    view = reading.view
    suspicion = suspect(view, cell)
    if suspicion.lost:
        try:
            view.claim(larger_cause(view, cell))
        except Wanted as wanted:
            reading.wanted.append((cell, wanted.row))
        return
    best, weight = suspicion.best(view.index)
    if weight >= (CERTAIN_IF_FLAKY if view.evidence.flaky else CERTAIN):
        view.claim(best)
    elif view.pool.fair and np.max(information(view, suspicion), initial=-1.0) < LITTLE:
        view.claim(best)
        reading.vague.append(best)
    else:
        reading.open.append(suspicion)
