"""The account of a search: what has been shown of the cells that were not run, and what has not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanbisect.attribution import Caution, Isolated, Searched
from nanbisect.combinations import Count
from nanbisect.neutrality import ADVICE, listed
from nanbisect.outcome import Status
from nanbisect.report.words import clip, code, counted, one_line, was
from nanbisect.search.space import Space
from nanbisect.search.values import Account, Combination, Plan, Strategy

SHOWN = 4
LONGEST = 300


@dataclass(frozen=True)
class Barred:
    """Levels that this machine can't run together, why, and how many cells of the matrix hold them."""

    levels: Mapping[str, str]
    reason: str
    cells: int


@dataclass(frozen=True)
class SearchSummary:
    """How the cells of a run were chosen, and what that shows. `ended` says why it ended, or nothing.

    `whole`: in the end every cell of the matrix was run, so that nothing rests on the choice.
    """

    plan: Plan
    account: Account
    space: Space
    ended: str = ""
    barred: tuple[Barred, ...] = ()
    whole: bool = False

    def searched(self, count: Count) -> Searched | None:
        """What the attribution needs of it."""
        if self.whole:
            return None
        isolated = (
            Isolated(self.space.named(one.levels), one.minimal and one.told_apart, one.checked)
            for one in self.account.causes
        )
        return Searched(tuple(isolated), count)

    def sentences(self) -> tuple[str, ...]:
        """The account in words."""
        return tuple(self._sentences())

    def _sentences(self) -> Iterator[str]:
        known = self.account
        how = known.strategy.value
        if self.plan.strategy is Strategy.ADAPTIVE:
            how += f", strength {','.join(map(str, self.plan.strength))}"
        ended = f"The run ended because {self.ended}." if self.ended else "The search did not come to its end."
        many = f"{known.cells:,} of {known.of_cells:,} cells {was(known.cells)} run"
        yield f"{many}, those that the search asked for ({how}). {ended}"
        yield (
            f"Of all combinations of up to {counted(known.up_to, 'level')}, {known.refuted:,} are refuted by a finite "
            f"cell, {known.explained:,} explained by a cause, {known.untestable:,} untestable, {known.pending:,} "
            "pending."
        )
        least = [one for one in known.samples if not any({*other} < {*one} for other in known.samples)]
        if least:
            words = listed([self._words(one) for one in least[:SHOWN]], SHOWN)
            yield f"Untestable or pending {'are, for example,' if len(least) > 1 else 'is'} {words}, and what holds it."
        yield from known.claims
        yield from (f"Condition: {text[:1].lower()}{text[1:]}" for text in known.conditions)
        if known.bound is not None:
            yield (
                f"What is called refuted was finite in {counted(known.exposures, 'attempt')} or more and failed in "
                f"none; up to {100 * known.bound:.0f} % of its attempts may still fail (Clopper-Pearson, 95 %)."
            )

    def _words(self, combination: Combination) -> str:
        return " with ".join(code(f"{name}={level}") for name, level in self.space.named(combination).items())

    def cautions(self) -> tuple[Caution, ...]:
        """What this machine can't run, which a search leaves out from the start."""
        return tuple(
            Caution(
                "not_judged",
                f"{one.cells:,} of {self.account.of_cells:,} cells can't run here: "
                f"{listed([f'{name}={level}' for name, level in one.levels.items()])}: "
                f"{clip(one_line(one.reason), LONGEST).rstrip('.')}.",
                ADVICE[Status.UNSUPPORTED],
            )
            for one in self.barred
            if one.cells
        )

    def to_json(self) -> dict[str, Any]:
        """The account as JSON values."""
        known = self.account
        return {
            "refuted": known.refuted,
            "explained": known.explained,
            "untestable": known.untestable,
            "pending": known.pending,
            "up_to_factors": known.up_to,
            "strategy": known.strategy.value,
            "strength": list(self.plan.strength),
            "budget": self.plan.budget,
            "ended": self.ended or None,
            "complete": known.complete,
            "cells": known.cells,
            "of_cells": known.of_cells,
            "attempts": known.attempts,
            "causes": [
                {
                    "levels": self.space.named(one.levels),
                    "matching": one.matching,
                    "failed": one.failed,
                    "unjudged": one.unjudged,
                    "checked_with": one.checked,
                    "witnesses": {
                        self.space.factors[part[0]].name: [self.space.levels(row) for row in rows[:SHOWN]]
                        for part, rows in zip(one.levels, one.witnesses, strict=True)
                    },
                    "unseen": self._names(one.unseen),
                    "untestable": [self.space.named(combination) for combination in one.untestable],
                }
                for one in known.causes
            ],
            "open": [self.space.levels(row) for row in known.open],
            "not_known": [self.space.named(combination) for combination in known.samples],
            "flaky": known.flaky,
            "bound": known.bound,
            "claims": known.claims,
            "conditions": known.conditions,
        }

    def _names(self, combination: Combination) -> list[str]:
        return [f"{self.space.factors[f].name}={self.space.factors[f].levels[at]}" for f, at in combination]
