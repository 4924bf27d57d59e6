"""Why a cell is run, in a few words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nanbisect.search.index import Bools
from nanbisect.search.space import holds
from nanbisect.search.suspicion import Suspicion
from nanbisect.search.values import Account, Combination, Plan, Row, Strategy
from nanbisect.search.view import View

OF = {1: "levels", 2: "pairs", 3: "triples"}
BASELINE = "control: the baseline"
FINITE_WANTED = "looks for a cell that is finite: every one so far failed"
LIKELIEST = "control: the likeliest to fail, the last level of every factor"


def covers(view: View, row: Row, open_: Bools) -> str:
    """`covers 41 untried pairs`: the largest share of what a row covers, by size."""
    counts = np.bincount(view.index.size[view.index.numbers(row)][open_[view.index.numbers(row)]], minlength=5)
    size = int(np.argmax(counts))
    name = OF.get(size, f"combinations of {size}")
    return f"covers {counts[size]} untried {name if counts[size] > 1 else name.rstrip('s')}"


def tells_apart(view: View, suspicion: Suspicion, row: Row) -> str:
    """`tells apart attention=eager alone from attention=eager with batch_size=8`."""
    ranked = np.argsort(-suspicion.weights, kind="stable")
    combos = [view.index.combination(int(suspicion.suspects[at])) for at in ranked[:50]]
    kept = next((c for c in combos if holds(row, c)), None)
    gone = next((c for c in combos if not holds(row, c)), None)
    if not kept or not gone:
        return f"isolates the cause of {_cell(view, suspicion.cell)}"
    name = view.evidence.space.words
    return f"tells apart {name(kept)}{' alone' if len(kept) == 1 and len(gone) > 1 else ''} from {name(gone)}"


def halves(cell: Row, view: View) -> str:
    """A cause of more parts than were foreseen."""
    return f"isolates the cause of {_cell(view, cell)}: more than {view.index.order} levels together"


def verifies(view: View, claim: Combination, row: Row) -> str:
    """`checks attention=eager with batch_size=8 and padding_side=left`: up to three levels not seen with it yet."""
    name = view.evidence.space.words
    seen = {(f, at) for failed in view.evidence.failing if holds(failed, claim) for f, at in enumerate(failed)}
    fresh = [part for part in enumerate(row) if part not in seen and part not in claim]
    if not fresh:
        return f"checks {name(claim)} with other pairs of levels"
    return f"checks {name(claim)} with {' and '.join(name((part,)) for part in fresh[:3])}"


def repeats(view: View, row: Row, why: str) -> str:
    """`repeats this cell (3 of 5 finite)`, before the reason."""
    ends = view.evidence.cells[row]
    return f"repeats a cell ({ends.ok} of {view.evidence.exposures} finite attempts, {ends.bad} non-finite): {why}"


def _cell(view: View, row: Row) -> str:
    """A cell by its levels that are not the safe ones."""
    return view.evidence.space.words(tuple((f, at) for f, at in enumerate(row) if at)) or "the baseline"


def told(account: Account, plan: Plan, *, last: bool) -> Account:
    """The account with what may be claimed, and under which conditions; `last`: no combination has more factors."""
    if account.strategy is Strategy.FIRST_CAUSE:
        return replace(account, claims=("One cause was looked for; nothing else was.",))
    return replace(account, claims=tuple(_claims(account, last)), conditions=tuple(_conditions(account, plan)))


def _claims(account: Account, last: bool) -> Iterator[str]:
    if account.open and not account.refuted:
        yield "Every cell that was judged failed: nothing can be said of causes."
        return
    factors = f"{account.up_to} factor{'s' if account.up_to > 1 else ''}"
    if account.complete and last:
        yield "This matrix has no further cause."
    elif account.complete:
        yield f"Any further cause involves at least {account.up_to + 1} factors."
    else:
        parts = [
            f"{count} {'is' if count == 1 else 'are'} {word}"
            for count, word in ((account.pending, "not tried"), (account.untestable, "not testable here"))
            if count
        ]
        if parts:
            yield f"Of the combinations of up to {factors}, {' and '.join(parts)}: a cause among them is possible."
        if account.open:
            yield f"{len(account.open)} failing cell{'s' if len(account.open) > 1 else ''} not explained yet."
    if account.causes and account.checked and account.verified:
        most = f"are at most {account.checked} causes" if account.checked > 1 else "is only one cause"
        alike = ", levels of one factor that act alike counted as one" if len(account.causes) > account.distinct else ""
        yield f"If there {most} in all{alike}, no cause listed is broader than the truth."


def _conditions(account: Account, plan: Plan) -> Iterator[str]:
    if account.flaky:
        yield (
            f"A failure shows in at least {plan.p_min:.0%} of the attempts of every cell that holds its cause, "
            f"whatever the others showed; each cause is missed with a probability of at most {plan.alpha:.0%}."
        )
    else:
        yield "A cell that ended finite once always does."
