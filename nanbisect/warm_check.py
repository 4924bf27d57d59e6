"""Whether cells may start warm: a user's command may, once one of its cells has ended both ways alike.

What the built-in trainer imports is known. A command may have an import that must happen in its own
process: the first cell that is judged is run once more, warm, and every number must be the same.
"""

from __future__ import annotations

from nanbisect.executors.base import WarmStart
from nanbisect.outcome import Outcome

SAME = ("status", "site", "loss", "grad_norm", "first_gradients", "channels", "records")


class WarmCheck:
    """`allowed`: None until a cell was compared."""

    def __init__(self, *, wanted: bool) -> None:
        self.allowed: bool | None = None if wanted else True

    def start(self, warm: WarmStart | None) -> WarmStart | None:
        """How an attempt may start."""
        return warm if warm is not None and (warm.ours or self.allowed) else None

    def due(self, warm: WarmStart | None, outcome: Outcome) -> bool:
        """Whether this cold outcome is the one to compare with."""
        return warm is not None and not warm.ours and self.allowed is None and outcome.judged

    def settle(self, cold: Outcome, warm: Outcome) -> str | None:
        """Takes the comparison in; returns what is to be said if cells must start cold."""
        name = difference(cold, warm)
        self.allowed = name is None
        if name is None:
            return None
        first, second = (_short(outcome, name) for outcome in (cold, warm))
        return (
            f"attempts start cold: the first cell, started warm too, had another {name} ({second} instead of {first}). "
            "Its script draws random numbers without a seed, or imports something that must not be imported early; "
            "--no-check starts them warm all the same"
        )


def difference(cold: Outcome, warm: Outcome) -> str | None:
    """The first of what must be the same that is not."""
    ours, theirs = cold.to_json(), warm.to_json()
    return next((name.replace("_", " ") for name in SAME if ours[name] != theirs[name]), None)


def _short(outcome: Outcome, name: str) -> str:
    value = outcome.to_json()[name.replace(" ", "_")]
    return str(value[0] if isinstance(value, list) and value else value)[:80]
