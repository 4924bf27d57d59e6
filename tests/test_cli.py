"""Bad input at the command line: one message with what, where and what to try; code 2; nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanbisect.console import LOOKING
from tests import tiny
from tests.commands import nanbisect, result

RUN = ("run", "m.yaml", "--out", "out")
MATRIX = """
trainer: sft
recipe: causal-lm
model: model
data: train.jsonl
steps: 1
settings: {{precision: fp32, max_length: {length}}}
factors:
  batch_size: [1, 2]
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny.checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def place(tmp_path: Path, checkpoint: Path) -> Path:
    """A folder with a matrix, a model and data that work."""
    (tmp_path / "model").symlink_to(checkpoint)
    (tmp_path / "m.yaml").write_text(MATRIX.format(length=64))
    tiny.write_lines(tmp_path / "train.jsonl", tiny.chats(6))
    return tmp_path


def nothing_written(place: Path) -> None:
    """No run folder was begun."""
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model-path", "./nope"), ("nope", "is not there", "--model-path")),
        (("--train-jsonl", "nope.jsonl"), ("nope.jsonl", "is not there", "--train-jsonl")),
        (("--set", "attention=fancy"), ("--set attention=fancy", "eager, sdpa")),
        (("--factor", "batch_size=1|1"), ("--factor batch_size=1|1",)),
        (("--factor", "colour=red|blue"), ("colour", "unknown")),
        (("--set", "channel_weights=1,8"), ("channel_weights", "one channel, text")),
        (("--timeout", "soon"), ("--timeout", "10m")),
        (("--gpus", "0"), ("--gpus",)),
        (("--keep-model", "--cold"), ("--keep-model and --cold",)),
        (("--no-such-flag",), ("--no-such-flag",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_flags_are_refused_before_anything_runs(
    place: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """With the flag by name."""
    done = nanbisect(*RUN, *flags, cwd=place)
    done.refused(*words)
    nothing_written(place)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process keeps a model at all")
def test_a_command_keeps_no_model(tmp_path: Path) -> None:
    """Its processes are its own."""
    text = "trainer: command\ncommand: [python, train.py]\nflags: {x: ['{value}']}\nfactors: {x: [1, 2]}\n"
    (tmp_path / "m.yaml").write_text(text)
    nanbisect(*RUN, "--keep-model", cwd=tmp_path).refused("--keep-model is of the built-in trainer", "try:")
    nothing_written(tmp_path)


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.mark.training
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ("no records", "train.jsonl")),
        (b'{"text": "caf\xe9"}\n', ("not UTF-8", "iconv")),
        (b'{"text": "fine"}\n{"title": "no text"}\n', ("record 2", "train.jsonl:2", "text")),
        (b'{"text": "fine"}\n{torn\n', ("train.jsonl:2", "not JSON")),
    ],
    ids=["empty", "not utf-8", "without text", "torn"],
)
def test_bad_data_is_refused_before_anything_runs(place: Path, data: bytes, words: tuple[str, ...]) -> None:
    """With the file and the line."""
    (place / "train.jsonl").write_bytes(data)
    nanbisect(*RUN, cwd=place).refused(*words, "try:")
    nothing_written(place)


@pytest.mark.training
def test_labels_all_ignored_name_the_record(place: Path) -> None:
    """A length that cuts every answer away."""
    (place / "m.yaml").write_text(MATRIX.format(length=3))
    tiny.write_lines(place / "train.jsonl", [{"id": "long", **CHAT}])
    nanbisect(*RUN, cwd=place).refused("record long", "no label", "max_length")
    nothing_written(place)


@pytest.mark.training
@pytest.mark.parametrize("where", ["import", "model", "records", "collate", "losses"])
def test_a_recipe_that_raises_is_named_with_its_line(tmp_path: Path, where: str) -> None:
    """In whichever of its functions, and no folder is left."""
    raises = 'raise RuntimeError("my own trouble")'
    bodies = {
        "model": "    import torch\n    return torch.nn.Linear(2, 1)",
        "records": '    yield {"id": 1}',
        "collate": "    return {}",
        "losses": "    return {}",
    }
    heads = {"model": "settings", "records": "settings", "collate": "records, settings", "losses": "model, batch"}
    text = f"{raises}\n" if where == "import" else ""
    for name, head in heads.items():
        text += f"def {name}({head}):\n" + (f"    {raises}\n" if name == where else f"{bodies[name]}\n")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "m.yaml").write_text("trainer: sft\nrecipe: mine.py\nfactors: {batch_size: [1, 2]}\n")
    nanbisect(*RUN, cwd=tmp_path).refused("mine.py", "my own trouble")
    nothing_written(tmp_path)


@pytest.mark.training
def test_a_finite_run_ends_with_zero_and_resumes_to_the_same(place: Path) -> None:
    """Code 0; --resume of a finished run runs nothing again; another matrix is refused; repeats add attempts."""
    done = nanbisect(*RUN, cwd=place)
    assert done.code == 0, done.out + done.err
    before = (place / "out" / "result.json").read_text()
    again = nanbisect(*RUN, "--resume", cwd=place)
    assert again.code == 0, again.err
    assert "2 of them done before" in again.out
    assert json.loads((place / "out" / "result.json").read_text())["cells"] == json.loads(before)["cells"]
    used = nanbisect(*RUN, cwd=place)
    used.refused("not empty", "--resume")
    assert LOOKING not in used.out + used.err  # said at once
    nanbisect(*RUN, "--resume", "--steps", "2", cwd=place).refused("another matrix", "steps")
    data = (place / "train.jsonl").read_text()
    (place / "train.jsonl").write_text(data.replace("a", "e", 1))
    nanbisect(*RUN, "--resume", cwd=place).refused("another data", "a new run")
    assert "the data is not what it was" in nanbisect("rerun", "out", "1", "--with", "max_length=32", cwd=place).out
    (place / "train.jsonl").write_text(data)
    nanbisect("rerun", "out", "batch_size", cwd=place).refused("2 cells match")
    nanbisect("rerun", "out", "1", "--with", "precision=fp99", cwd=place).refused("fp99", "bf16")
    nanbisect("rerun", "nowhere", "1", cwd=place).refused("no run 'nowhere'")
    nanbisect("report", ".", cwd=place).refused("is not a run folder")
    twice = nanbisect("rerun", "out", "2", "--repeat", "2", cwd=place)
    assert twice.code == 0, twice.err
    attempts = result(place / "out")["cells"][1]["attempts"]
    assert [attempt["seed"] for attempt in attempts] == [0, 0, 1]


@pytest.mark.training
def test_a_run_goes_below_reports_and_its_matrix_may_be_elsewhere(place: Path) -> None:
    """The default folder is relative to where the command is typed, the matrix's paths to the matrix."""
    (place / "from" / "here").mkdir(parents=True)
    done = nanbisect("run", "../../m.yaml", cwd=place / "from" / "here")
    assert done.code == 0, done.out + done.err
    (folder,) = (place / "from" / "here" / "reports").iterdir()
    assert folder.name.startswith("m-")
    assert f"report: reports/{folder.name}/report.md" in done.out
    assert nanbisect("rerun", "latest", "1", cwd=place / "from" / "here").code == 0
    assert nanbisect("report", folder.name, cwd=place / "from" / "here").out.startswith("## nanbisect: m")


@pytest.mark.training
def test_a_cell_that_is_not_judged_gives_three(place: Path) -> None:
    """A level that this machine can't run is named; the rest is judged."""
    done = nanbisect(
        *RUN, "--set", "batch_size=1", "--factor", "attention=sdpa|sdpa:efficient", "--device", "cpu", cwd=place
    )
    assert done.code == 3, done.err
    assert result(place / "out")["counts"] == {"finite": 1, "unsupported": 1}
    assert "not on this machine: attention=sdpa:efficient" in done.out


@pytest.mark.training
def test_an_interrupt_keeps_what_ended_and_says_how_to_go_on(place: Path) -> None:
    """Ctrl-C: code 130, no process left, and --resume finishes."""
    import signal
    import time

    command = [sys.executable, "-m", "nanbisect", *RUN, "--repeat", "2"]
    listens = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", listens, *command]  # tests in the background of a shell ignore it
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not list((place / "out").glob("cells/*/attempt-1/outcome.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "go on with: nanbisect run m.yaml --out out --repeat 2 --resume" in out
    done = nanbisect(*RUN, "--repeat", "2", "--resume", cwd=place)
    assert done.code == 0, done.err
    assert result(place / "out")["counts"] == {"finite": 2}


@pytest.mark.training
def test_a_plan_shows_order_exclusions_and_what_cannot_run(place: Path) -> None:
    """Without running a cell."""
    (place / "m.yaml").write_text(
        MATRIX.format(length=64) + "  attention: [sdpa, eager, flash]\nexclude: [{batch_size: 2, attention: eager}]\n"
    )
    done = nanbisect("plan", "m.yaml", "--device", "cpu", cwd=place)
    assert done.code == 0, done.err
    assert "5 cells (1 excluded), 3 can run here on cpu" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["1", "1", "1", "sdpa", "baseline"] in lines
    assert ["2", "2", "1", "eager", "likeliest", "to", "fail"] in lines
    assert "excluded: batch_size=2 attention=eager" in done.out
    assert "can't run here: attention=flash" in done.out
    schema = nanbisect("plan", "--schema", cwd=place)
    assert json.loads(schema.out)["additionalProperties"] is False


def test_a_bug_of_ours_shows_no_traceback(place: Path) -> None:
    """The last resort says where the traceback is."""
    code = "import nanbisect.cli as c, nanbisect.app as a\na.report = lambda *x, **k: 1 / 0\nc.main()"
    done = subprocess.run([sys.executable, "-c", code, "report", "latest"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    file = Path(done.stderr.split("report it with ")[1].split(";")[0])
    assert "ZeroDivisionError" in file.read_text()
    file.unlink()
