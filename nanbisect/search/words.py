"""Why a cell is run, in a few words."""

from __future__ import annotations

import numpy as np

from nanbisect.search.space import holds
from nanbisect.search.suspicion import Suspicion
from nanbisect.search.values import Combination, Row
from nanbisect.search.view import View

OF = {1: "levels", 2: "pairs", 3: "triples"}


def covers(count: int, t: int) -> str:
    """`covers 41 untried pairs`."""
    return f"covers {count} untried {OF.get(t, 'combinations') if t == 1 else 'combinations'}"


def tells_apart(view: View, suspicion: Suspicion, row: Row) -> str:
    """`tells apart attention=eager alone from attention=eager with batch_size=8`."""
    ranked = np.argsort(-suspicion.weights, kind="stable")
    combos = [view.index.combination(int(suspicion.suspects[at])) for at in ranked[:50]]
    kept = next((c for c in combos if holds(row, c)), None)
    gone = next((c for c in combos if not holds(row, c)), None)
    if not kept or not gone:
        return f"isolates the cause of a failing cell, {view.evidence.space.words(combos[0])} suspected"
    name = view.evidence.space.words
    return f"tells apart {name(kept)}{' alone' if len(kept) == 1 and len(gone) > 1 else ''} from {name(gone)}"


def halves(view: View, cell: Row) -> str:
    """A cause of many factors."""
    return "halves what a failing cell and a finite one differ in: its cause has many parts"


def verifies(view: View, claim: Combination, row: Row) -> str:
    """`checks attention=eager with untried levels of the others`."""
    return f"checks {view.evidence.space.words(claim)} with other levels of the rest"
