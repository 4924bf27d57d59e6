"""The machine-readable result: `result.json`, schema 1. Non-finite numbers by name, levels and ids as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanbisect.attribution import Cause
from nanbisect.matrix_file import matrix_to_json
from nanbisect.outcome import CellResult, Outcome, Site, jsonable
from nanbisect.report.completeness import completeness
from nanbisect.report.inputs import RunInputs

SCHEMA = 1


def to_result(inputs: RunInputs) -> dict[str, Any]:
    """The run as plain JSON values."""
    attribution = inputs.attribution
    result = {
        "schema": SCHEMA,
        "matrix": matrix_to_json(inputs.matrix),
        "environment": inputs.environment,
        "counts": inputs.counts,
        "cells": [cell_to_result(result) for result in inputs.ordered],
        "causes": [_cause(cause) for cause in attribution.causes],
        "neutral": attribution.neutral,
        "divergences": [asdict(moved) for moved in attribution.divergences],
        "completeness": _completeness(inputs),
        "cautions": [asdict(caution) for caution in inputs.cautions],
    }
    return dict(jsonable(result))


def _completeness(inputs: RunInputs) -> dict[str, Any]:
    """By the search's account, where one chose the cells; else counted over all cells."""
    if inputs.search is None:
        return completeness(inputs.matrix.factors, inputs.ordered, inputs.attribution.causes)
    return inputs.search.to_json()


def cell_to_result(result: CellResult) -> dict[str, Any]:
    """One cell, as the attempt that speaks for it saw it; status and site are null when it was not run."""
    outcome = result.outcome
    return {
        "number": result.cell.number,
        "id": result.cell.id,
        "levels": result.cell.levels,
        "resolved": outcome.resolved if outcome else {},
        "status": outcome.status.value if outcome else None,
        "reason": outcome.reason if outcome else None,
        "attempts": [_attempt(attempt) for attempt in result.attempts],
        "site": _site(outcome.site) if outcome else None,
        "origin": outcome.origin if outcome else None,
        "smear": asdict(outcome.smear) if outcome and outcome.smear else None,
        "loss": outcome.loss if outcome else (),
        "grad_norm": outcome.grad_norm if outcome else (),
        "channels": outcome.channels if outcome else {},
        "records": [str(record) for record in outcome.records] if outcome else [],
        "suspects": [str(record) for record in outcome.suspects] if outcome else [],
        "repairs": [asdict(note) for note in outcome.repairs] if outcome else [],
        "doubts": [asdict(note) for note in outcome.doubts] if outcome else [],
        "seconds": outcome.seconds if outcome else None,
    }


def _attempt(outcome: Outcome) -> dict[str, Any]:
    return {
        "attempt": outcome.attempt,
        "seed": outcome.seed,
        "status": outcome.status.value,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
        **({"started": outcome.started} if outcome.started else {}),
    }


def _site(site: Site | None) -> dict[str, Any] | None:
    """A site; its loss where that is known, `ranks` where several processes trained."""
    if site is None:
        return None
    return {name: value for name, value in asdict(site).items() if value is not None}


def _cause(cause: Cause) -> dict[str, Any]:
    data = {**asdict(cause), "standing": cause.standing.value}
    return {name: value for name, value in data.items() if name != "checked" or value is not None}
