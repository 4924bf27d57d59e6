"""Outcomes as a frame and as CSV: one row a cell, harmless in a spreadsheet."""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Site, Status
from nanbisect.tables import cells_frame, to_csv

BAD = Outcome(
    Status.NONFINITE,
    "nan in backward",
    site=Site(1, 0, 0, "backward", "nan", ("k_proj.weight",)),
    loss=(3.789,),
    grad_norm=(math.nan,),
    seconds=1.5,
)
GOOD = Outcome(Status.FINITE, "finite", loss=(3.5, 3.25), grad_norm=(1.25, 1.0), seconds=2.25)
RESULTS = (
    CellResult(Cell(2, {"attention": "eager", "channel_weights": "1,8"}), (GOOD, BAD)),
    CellResult(Cell(1, {"channel_weights": "1,8", "attention": "sdpa"}), (GOOD,)),
    CellResult(Cell(3, {"attention": "flash", "channel_weights": "1,8"})),
)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_has_a_row_a_cell_by_number() -> None:
    assert to_csv(RESULTS) == (
        "number,attention,channel_weights,status,step,micro_batch,phase,kind,first_parameter,loss_1,grad_norm_1,attempts,"
        "seconds,reason\n"
        '1,sdpa,"1,8",finite,,,,,,3.5,1.25,1,2.25,finite\n'
        '2,eager,"1,8",nonfinite,1,0,backward,nan,k_proj.weight,3.789,nan,2,3.75,nan in backward\n'
        '3,flash,"1,8",,,,,,,,,0,0,\n'
    )


def test_the_frame_has_the_same_columns_and_missing_values() -> None:
    frame = cells_frame(RESULTS)
    assert list(frame.columns) == next(csv.reader(io.StringIO(to_csv(RESULTS))))
    assert list(frame["number"]) == [1, 2, 3]
    assert list(frame["attention"]) == ["sdpa", "eager", "flash"]
    assert frame["loss_1"].dtype == float
    assert list(frame["loss_1"][:2]) == [3.5, 3.789]
    assert pd.isna(frame["status"][2])
    assert len(cells_frame([])) == 0


def test_a_factor_may_be_called_like_a_column() -> None:
    row = read(to_csv([CellResult(Cell(1, {"seconds": "5"}), (GOOD,))]))[0]
    assert (row["setting.seconds"], row["seconds"]) == ("5", "2.25")


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\n=1", " =1", "+inf"])
def test_no_text_is_a_formula(text: str) -> None:
    bad = Outcome(Status.FAILED, text)
    row = read(to_csv([CellResult(Cell(1, {text: text}), (bad,))]))[0]
    assert row["reason"] == f"'{text.strip()}"
    assert all(value[:1] not in tuple("=+-@") for pair in row.items() for value in pair)


def test_plain_numbers_keep_their_sign() -> None:
    (row,) = read(to_csv([CellResult(Cell(1, {"pad": "-100", "lr": "-1e-3"}), ())]))
    assert (row["pad"], row["lr"]) == ("-100", "-1e-3")


@given(st.text(st.characters(), max_size=20))
def test_any_text_stays_in_its_cell(text: str) -> None:
    written = to_csv([CellResult(Cell(1, {"f": text}), (Outcome(Status.FAILED, text),))])
    written.encode()
    assert [row["status"] for row in read(written)] == ["failed"]
    assert written.count("\n") == 2


def test_csv_needs_no_pandas() -> None:
    code = "import sys; from nanbisect.tables import to_csv; to_csv([]); sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
