"""Commands that can't be judged: what is said, where, and what to try; in a run and under watch.

Never a traceback of ours, never a process left behind by a run, and nothing of it is called finite.
"""

from __future__ import annotations

import json
import os
import sys
import time
import venv
from pathlib import Path

import psutil
import pytest

from tests.commands import Done, nanbisect, result

pytestmark = pytest.mark.training
PYTHON = sys.executable


def matrix(folder: Path, *words: str, more: str = "", trainer: str = "command") -> None:
    """A matrix of two cells over a command."""
    told = f"command: {json.dumps(list(words))}\n"
    flags = "flags: {mode: {off: [], on: [--on]}}\nfactors: {mode: [off, on]}\n" if trainer == "command" else ""
    (folder / "bad.yaml").write_text(f"name: bad\ntrainer: {trainer}\ndevice: cpu\ntimeout: 60s\n{told}{flags}{more}")


def run(folder: Path, *words: str, more: str = "") -> Done:
    """Run a command in a matrix."""
    matrix(folder, *words, more=more)
    return quiet(nanbisect("run", "bad.yaml", "--out", "out", cwd=folder))


def watch(folder: Path, *words: str, env: dict[str, str] | None = None) -> Done:
    """Watch a command."""
    return quiet(nanbisect("watch", "--json", "seen.json", "--", *words, cwd=folder, env=env))


def quiet(done: Done) -> Done:
    """No traceback of ours."""
    assert "nanbisect/" not in done.err.replace("\\", "/"), done.err
    assert "bug" not in done.err
    return done


def status(folder: Path) -> str:
    """What watch wrote."""
    return str(json.loads((folder / "seen.json").read_text())["status"])


def unjudged(folder: Path, done: Done, name: str, *words: str) -> None:
    """All cells of a run ended so, with these words on the screen and in the report; exit code 3."""
    assert done.code == 3, done.out + done.err
    assert [cell["status"] for cell in result(folder / "out")["cells"]] == [name, name]
    page = (folder / "out" / "report.md").read_text().replace("\\", "")
    for word in words:
        assert word in done.out, done.out
        assert word in page, page


@pytest.mark.parametrize(
    ("word", "said"),
    [("no-such-trainer", "no-such-trainer"), ("./train.sh", "./train.sh"), ("./plain.py", "./plain.py")],
)
def test_a_command_that_is_not_there_or_is_no_program(tmp_path: Path, word: str, said: str) -> None:
    """Refused at once: no cell is started, nothing is left."""
    (tmp_path / "plain.py").write_text("print('hello')\n")
    run(tmp_path, word, "--steps", "{steps}").refused(said, "try: ")
    assert not (tmp_path / "out").exists()
    watch(tmp_path, word).refused(said, "try: ")
    assert not (tmp_path / "seen.json").exists()


TRAINS = """
import sys, torch
model = torch.nn.Linear(2, 1)
loss = model(torch.ones(1, 2)).mean()
if "--never" not in sys.argv:
    loss.backward()
print("trained")
"""


@pytest.mark.parametrize("words", [("env", "-u", "PYTHONPATH", PYTHON), (PYTHON, "-I")], ids=["env", "isolated"])
def test_a_wrapper_that_drops_pythonpath_is_the_likely_reason(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The probe was not there, which is no word about the training."""
    (tmp_path / "train.py").write_text(TRAINS)
    said = ("the probe was not there", "PYTHONPATH", "container, ssh, sudo", "python -I")
    if words[0] == "env":
        unjudged(tmp_path, run(tmp_path, *words, "train.py"), "no_training", *said)
    done = watch(tmp_path, *words, "train.py")
    assert (done.code, done.out, status(tmp_path)) == (0, "trained\n", "no_training")
    for word in (*said, "next: ", "NANBISECT_PROBE"):
        assert word in done.err, done.err


def test_a_script_that_never_calls_backward(tmp_path: Path) -> None:
    """The probe was there, and saw none."""
    (tmp_path / "train.py").write_text(TRAINS)
    said = "the probe saw no backward pass: no process that has it called backward"
    unjudged(tmp_path, run(tmp_path, PYTHON, "train.py", "--never"), "no_training", said)
    done = watch(tmp_path, PYTHON, "train.py", "--never")
    assert (done.code, status(tmp_path)) == (0, "no_training")
    assert said in done.err


BEFORE = """
import sys
print("reading the data")
sys.stderr.write("data.jsonl: line 7 is no JSON\\n")
sys.exit(4)
"""


def test_a_script_that_ends_before_it_trains(tmp_path: Path) -> None:
    """Its code and its last lines; that the probe was not there is its own fault."""
    (tmp_path / "train.py").write_text(BEFORE)
    last = "the training exited with code 4; its log ends with: data.jsonl: line 7 is no JSON"
    done = run(tmp_path, PYTHON, "train.py")
    unjudged(tmp_path, done, "failed", last, "reading the data")
    assert "the end of the log of cell 1\n  reading the data\n  data.jsonl: line 7 is no JSON" in done.out
    done = watch(tmp_path, PYTHON, "train.py")
    assert (done.code, status(tmp_path)) == (4, "failed")
    assert "the training exited with code 4" in done.err
    assert "data.jsonl: line 7 is no JSON" in done.err


def test_a_python_without_torch(tmp_path: Path) -> None:
    """Said before any cell runs; under watch it is told from a lost PYTHONPATH."""
    (tmp_path / "train.py").write_text(TRAINS)
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    run(tmp_path, python, "train.py").refused("has no torch", python, "try: activate the environment")
    assert not (tmp_path / "out").exists()
    done = watch(tmp_path, python, "-c", "import torch")
    assert (done.code, status(tmp_path)) == (1, "failed")
    assert "No module named 'torch'" in done.err
    assert "no Python process that has the probe imported torch" in done.err


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    """Said before any cell runs; under watch the training is left alone and not judged."""
    (tmp_path / "train.py").write_text(TRAINS)
    package = tmp_path / "lib" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .version import __version__\n")
    (package / "version.py").write_text("__version__ = '1.13.1'\n")
    (tmp_path / "train.py").write_text(TRAINS)
    done = run(tmp_path, PYTHON, "train.py", more="env: {PYTHONPATH: lib}\n")
    done.refused("has torch 1.13.1; the probe needs 2.1", "try: a newer torch")
    words = (PYTHON, "-c", "import torch; print(torch.__version__)")
    paths = (str(package.parent), os.environ.get("PYTHONPATH", ""))
    done = watch(tmp_path, *words, env={"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    assert (done.code, done.out, status(tmp_path)) == (0, "1.13.1\n", "failed")
    assert "nanbisect: torch 1.13.1 is too old for the probe, which needs 2.1\n" in done.err
    assert "not judged: the probe could not be installed: torch 1.13.1 is too old" in done.err


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        with open(sys.argv[1], "a") as file:
            file.write("%d\\n" % os.getpid())
        time.sleep(120)
    os._exit(0)
os.wait()
time.sleep(0.2)
print("started")
"""


def daemons(folder: Path) -> list[psutil.Process]:
    """Those that still live."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_a_command_that_goes_into_the_background(tmp_path: Path) -> None:
    """A run ends what it left; watch says that it is there and leaves it alone."""
    (tmp_path / "train.py").write_text(DAEMON)
    said = "the command ended and left processes behind in the background"
    unjudged(tmp_path, run(tmp_path, PYTHON, "train.py", "pids"), "failed", said, "in the foreground")
    assert len((tmp_path / "pids").read_text().split()) == 2
    deadline = time.monotonic() + 10
    while daemons(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert daemons(tmp_path) == []
    done = watch(tmp_path, PYTHON, "train.py", "pids")
    (process,) = daemons(tmp_path)
    process.kill()
    assert (done.code, done.out, status(tmp_path)) == (0, "started\n", "failed")
    assert said in done.err
    assert f"still running, and watched no longer: process {process.pid}" in done.err


def test_a_flag_that_the_installed_trainer_does_not_have(tmp_path: Path) -> None:
    """An older transformers stands on the path; its name for checkpointing is known, one flag is not there."""
    (tmp_path / "train.py").write_text(TRAINS)
    package = tmp_path / "lib" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    fields = (
        *("output_dir", "max_steps", "seed", "logging_nan_inf_filter", "logging_strategy", "logging_steps"),
        *("save_strategy", "eval_strategy", "report_to", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    )
    body = "".join(f"    {name}: str = ''\n" for name in fields)
    (package / "training_args.py").write_text(f"class TrainingArguments:\n{body}")
    (tmp_path / "train.py").write_text(TRAINS)
    more = "env: {PYTHONPATH: lib}\nfactors: {gradient_checkpointing: [off, on]}\n"
    matrix(tmp_path, PYTHON, "train.py", more=more, trainer="transformers")
    done = quiet(nanbisect("run", "bad.yaml", "--out", "out", cwd=tmp_path))
    done.refused("the installed trainer has no push_to_hub", str(package / "training_args.py"), "try: ")
    assert not (tmp_path / "out").exists()


def test_a_placeholder_that_nothing_fills(tmp_path: Path) -> None:
    """With its line and column, and what was meant; in plan, too."""
    matrix(tmp_path, PYTHON, "train.py", "--steps", "{stpes}")
    for verb in ("run", "plan"):
        done = nanbisect(verb, "bad.yaml", cwd=tmp_path)
        done.refused(
            "bad.yaml: 1 problem", "line 5, column", "command[3]: the placeholder {stpes} has no value", "steps?"
        )
