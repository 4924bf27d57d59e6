"""Every training of the case bank is run and traced: what the trace says is true, and so is what the catalogue knows.

One warm process forks a child for each run, so that a case takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanbisect.causes import known
from nanbisect.causes.catalogue import ENTRIES
from tests.cases.bank import HERE, Case, chosen, healthy, sick
from tests.cases.near import without
from tests.cases.runner import SILENT, Host, anomaly, trace, underflow
from tests.cases.table import README, row_start
from tests.cases.verdict import wrong

KERNELS = {"cudnn_attention"}  # need a GPU; their events are in test_causes.py


@pytest.fixture(scope="module")
def watched() -> Iterator[Host]:
    """A warm process with the probe in it."""
    with Host(probe=True) as host:
        yield host


@pytest.fixture(scope="module")
def plain() -> Iterator[Host]:
    """A warm process without the probe."""
    with Host(probe=False) as host:
        yield host


@pytest.mark.training
@pytest.mark.parametrize("case", [*sick(), *healthy()], ids=lambda case: case.name)
def test_the_trace_is_right_and_its_cause_is_known(watched: Host, case: Case) -> None:
    """Phase, kind, operation, module and line; these causes and no other; without its evidence, not the cause."""
    traced = trace(watched, case)
    assert wrong(case, traced) == ()
    findings = known(traced.origin, traced.outcome)
    assert {finding.code for finding in findings} == set(case.causes)
    if traced.found:
        assert traced.origin is not None
        kept = {key: value for key, value in traced.origin.items() if key not in ("kind", "origin", "found")}
        assert known({**traced.origin["origin"], **kept}, traced.outcome) == findings  # as an outcome keeps it
    for finding in findings:
        assert traced.origin is not None
        less = known(*without(finding.code, traced.origin, traced.outcome))
        assert finding.code not in {other.code for other in less}


@pytest.mark.training
def test_the_other_aids_are_really_asked(plain: Host) -> None:
    """One case each that it is right about, and one in which it says nothing."""
    root, silent, overflow = (
        case for name in ("unselected_where-root", "norm_overflow", "fp16_overflow-half") for case in chosen([name])
    )
    assert root.truth is not None
    said = anomaly(plain, root)
    assert (said.text.split(",")[0], said.line) == ("SqrtBackward0", root.truth.line)
    assert anomaly(plain, silent).text == SILENT
    assert underflow(plain, overflow).module == "1.wo"
    assert underflow(plain, silent).text == SILENT


def test_every_script_is_in_the_bank() -> None:
    """At least 20 with a public report, and 10 healthy ones; every phase is there."""
    assert {case.script.stem for case in sick()} == {path.stem for path in (HERE / "sick").glob("*.py")}
    assert len({case.script for case in sick() if case.reports}) >= 20
    assert len(healthy()) >= 10
    phases = {case.truth.phase for case in sick() if case.truth is not None}
    assert phases >= {"load", "data", "forward", "loss", "backward", "recompute", "clip", "optimizer"}


def test_every_cause_has_a_case() -> None:
    """An entry that nothing brings is not tested."""
    assert {code for case in sick() for code in case.causes} == {entry.code for entry in ENTRIES} - KERNELS


@pytest.mark.parametrize("case", [*sick(), *healthy()], ids=lambda case: case.name)
def test_the_table_beside_the_cases_has_this_one(case: Case) -> None:
    """With its truth as it is now: `python -m tests.cases --write` after a change."""
    assert row_start(case) in README.read_text(encoding="utf-8")
