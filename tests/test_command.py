"""The command trainer: templates, placeholders, environment, configuration files, the check, one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanbisect.errors import MatrixError, UsageError
from nanbisect.matrix import Cell, Matrix, expand
from nanbisect.matrix_command import settings_of
from nanbisect.matrix_file import Overrides, matrix_from_json, matrix_to_json, read_matrix
from nanbisect.trainers.base import Launch
from nanbisect.trainers.command import INSTALLED, CommandTrainer
from nanbisect.trainers.interpreter import find_python
from nanbisect.trainers.presets import read as read_preset
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
from tests.commands import nanbisect, result

TRAINER = TRAINERS["command"]
HEAD = "trainer: command\ncommand: [python, train.py, --n, '{steps}']\n"
WHOLE = """\
trainer: command
command: [python, train.py, --steps, "{steps}", --seed, "{seed}", --lr, "{lr}", --out, "{cell_dir}/x"]
steps: 3
settings: {lr: 2e-5, gradient_accumulation: 2}
flags:
  batch_size: [--batch, "{value}"]
  gradient_accumulation: ["--accumulate={value}"]
  checkpointing: {on: [--checkpointing], off: []}
  kernel: {a: [--kernel, a], "*": [--other, "{value}/{lr}"]}
factors:
  batch_size: [1, 8]
  checkpointing: [off, on]
  kernel: [a, b, c]
"""


def read(text: str, folder: Path | str = ".", **overrides: Any) -> Matrix:
    """A matrix, as a file `m.yaml` would be read."""
    return read_matrix(
        text, source="m.yaml", folder=str(folder), vocabularies=VOCABULARIES, overrides=Overrides(**overrides)
    )


def problems(text: str) -> list[tuple[int | None, str, str]]:
    """Line, path, and what with its mend."""
    with pytest.raises(MatrixError) as caught:
        read(text)
    return [(problem.line, problem.path, f"{problem.what}; {problem.mend}") for problem in caught.value.problems]


def launched(matrix: Matrix, folder: Path, *, trainer: Any = TRAINER, **levels: str) -> Launch:
    """The launch of the cell with these levels, the baseline's where not said."""
    cell = next(cell for cell in expand(matrix) if cell.levels == {**matrix.baseline, **levels})
    launch: Launch = trainer.launch(matrix, cell, seed=7, folder=folder)
    return launch


# words -----------------------------------------------------------------------------------------


def test_a_cell_becomes_the_command_with_its_flags(tmp_path: Path) -> None:
    """In the order of the flags; both sides of a level are said; a fixed setting is a flag, too."""
    matrix = read(WHOLE, tmp_path)
    plain = launched(matrix, tmp_path / "cell")
    head = ("python", "train.py", "--steps", "24", "--seed", "7", "--lr", "2e-5", "--out", f"{tmp_path}/cell/x")
    assert plain.argv == (*head, "--batch", "1", "--accumulate=2", "--kernel", "a")
    full = launched(matrix, tmp_path, batch_size="8", checkpointing="on", kernel="c")
    assert full.argv[10:] == ("--batch", "8", "--accumulate=2", "--checkpointing", "--other", "c/2e-5")


def test_cells_see_the_same_number_of_records(tmp_path: Path) -> None:
    """`steps` is that of the largest batch; the others take more, and so does the time they need."""
    matrix = read(WHOLE, tmp_path)
    steps = {level: launched(matrix, tmp_path, batch_size=level).env["NANBISECT_STEPS"] for level in ("1", "8")}
    assert steps == {"1": "24", "8": "3"}
    cells = expand(matrix)
    assert [TRAINER.work(matrix, cells)[cell.id] for cell in (cells[0], cells[-1])] == [48.0, 6.0]


def test_braces_that_are_no_placeholder_are_text(tmp_path: Path) -> None:
    """JSON passes, `{{x}}` is `{x}`, and a level is never a template."""
    text = (
        HEAD
        + """\
flags:
  how: [--kwargs, '{"use_reentrant": {value}}', '{{value}}']
factors: {how: ["true", "{seed}"]}
"""
    )
    matrix = read(text, tmp_path)
    assert launched(matrix, tmp_path).argv[4:] == ("--kwargs", '{"use_reentrant": true}', "{value}")
    assert launched(matrix, tmp_path, how="{seed}").argv[5] == '{"use_reentrant": {seed}}'


def test_switches_may_be_written_as_booleans(tmp_path: Path) -> None:
    """And are the levels on and off where the flags have those."""
    text = HEAD + "flags: {gc: {on: [--gc], off: [--no-gc]}}\nfactors: {gc: [false, true]}\n"
    assert read(text).baseline == {"gc": "off"}
    assert launched(read(text, tmp_path), tmp_path, gc="on").argv[-1] == "--gc"


def test_json_keeps_command_and_flags() -> None:
    """What `run.json` holds is the matrix."""
    matrix = read(WHOLE)
    assert matrix_from_json(json.loads(json.dumps(matrix_to_json(matrix)))) == matrix
    assert not {"command", "flags"} & set(matrix_to_json(Matrix("m", "sft", matrix.factors)))


def test_the_settings_of_a_matrix_can_be_had_again() -> None:
    """For `rerun --with`, which has the matrix and no file."""
    settings = settings_of(VOCABULARIES["command"], read(WHOLE).command, read(WHOLE).flags)
    assert set(settings) == {"seed", "lr", "batch_size", "gradient_accumulation", "checkpointing", "kernel"}
    assert settings["checkpointing"].choices == ("on", "off")


def test_model_and_data_are_whole_paths_or_names(tmp_path: Path) -> None:
    """A local one is absolute, a hub's stays as it is and is fetched once."""
    (tmp_path / "m").mkdir()
    text = (
        "trainer: command\ncommand: [x, '{model}', '{data}']\nfactors: {lr: [1, 2]}\nflags: {lr: [--lr, '{value}']}\n"
    )
    local = launched(read(text + "model: m\ndata: m\n", tmp_path), tmp_path)
    assert (local.argv[1:3], local.from_hub) == ((str(tmp_path / "m"), str(tmp_path / "m")), False)
    hub = launched(read(text + "model: Qwen/Qwen3-0.6B\ndata: trl-lib/Capybara\n", tmp_path), tmp_path)
    assert (hub.argv[1:3], hub.from_hub) == (("Qwen/Qwen3-0.6B", "trl-lib/Capybara"), True)
    with pytest.raises(UsageError, match="--model-path"):
        launched(read(text, tmp_path), tmp_path)


def test_every_launch_has_its_own_port(tmp_path: Path) -> None:
    """One that the system says is free."""
    matrix = read("trainer: command\ncommand: [x, '{port}', '{lr}']\nfactors: {lr: [1, 2]}\n", tmp_path)
    ports = {launched(matrix, tmp_path).argv[1] for _ in range(4)}
    assert len(ports) > 1
    assert all(1024 <= int(port) < 65536 for port in ports)


def test_a_launcher_without_a_flag_for_its_port_learns_it_all_the_same(tmp_path: Path) -> None:
    """The same one that {port} is; the matrix's own word stands."""
    text = "trainer: command\ncommand: [torchrun, '--master-port={port}', x.py, '{lr}']\nfactors: {lr: [1, 2]}\n"
    launch = launched(read(text, tmp_path), tmp_path)
    port = launch.argv[1].partition("=")[2]
    assert (launch.env["MASTER_PORT"], launch.env["PET_MASTER_PORT"]) == (port, port)
    script = "trainer: command\ncommand: [python, x.py, '{lr}']\n"
    plain = [launched(read(script + FACTORS, tmp_path), tmp_path).env for _ in range(3)]
    assert len({env["MASTER_PORT"] for env in plain}) == 3
    assert not any("PET_MASTER_PORT" in env for env in plain)
    own = launched(read(text + "env: {MASTER_PORT: '4711'}\n", tmp_path), tmp_path)
    assert own.env["MASTER_PORT"] == "4711"


# environment -----------------------------------------------------------------------------------


def test_the_probe_is_told_where_to_write_and_when_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH holds whole paths, the probe's first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib:/opt/lib")
    launch = launched(read(WHOLE, tmp_path), tmp_path / "cell")
    site, *rest = launch.env["PYTHONPATH"].split(":")
    assert site.endswith("nanbisect/probe/site")
    assert rest == [str(tmp_path / "lib"), "/opt/lib"]
    assert launch.env["NANBISECT_PROBE"] == str(tmp_path / "cell")
    assert launch.env["NANBISECT_STOP"] == "event"
    assert launch.workdir == str(tmp_path)


def test_trackers_are_off_unless_the_matrix_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 cells are not 40 runs in someone's project."""
    monkeypatch.setenv("WANDB_MODE", "online")
    assert launched(read(WHOLE, tmp_path), tmp_path).env["WANDB_MODE"] == "disabled"
    assert launched(read(WHOLE, tmp_path), tmp_path).env["AXOLOTL_DO_NOT_TRACK"] == "1"
    own = "env: {WANDB_MODE: offline, PYTHONPATH: src}\nworkdir: sub\n"
    (tmp_path / "sub").mkdir()
    launch = launched(read(WHOLE + own, tmp_path), tmp_path)
    assert launch.env["WANDB_MODE"] == "offline"
    assert launch.env["PYTHONPATH"].endswith(f":{tmp_path}/sub/src")


# configuration files ---------------------------------------------------------------------------

CONFIGURED = """\
trainer: command
command: [train, "{config}"]
settings: {lr: 1e-5}
flags:
  lr: {config.optimizer.lr: "{value}"}
  mode:
    a: {config.mode: {kind: "no", note: "{lr} {seed}"}, config.packing: false}
    b: {config.mode: [1, "{value}"], config.optimizer.eps: 1e-8}
factors: {mode: [a, b]}
"""


def test_keys_become_a_file_that_trainers_read_back(tmp_path: Path) -> None:
    """They read with PyYAML, to which 1e-05 is text."""
    matrix = read(CONFIGURED, tmp_path)
    launch = launched(matrix, tmp_path)
    text = Path(launch.argv[1]).read_text()
    assert Path(launch.argv[1]).parent == tmp_path
    assert "lr: 1.0e-05" in text
    mode = {"kind": "no", "note": "1e-5 7"}
    assert yaml.safe_load(text) == {"optimizer": {"lr": 1e-5}, "mode": mode, "packing": False}
    launched(matrix, tmp_path, mode="b")
    again = yaml.safe_load(Path(launch.argv[1]).read_text())
    assert again == {"optimizer": {"lr": 1e-5, "eps": 1e-8}, "mode": [1, "b"]}


PRESET = """\
command: [toy, "{config}"]
arguments: {config.out: "{cell_dir}"}
forced: {config.steps: "{steps}", config.new|old: 1}
settings:
  config_file: {summary: yours}
  lr: {summary: rate, kind: number, flags: {config.lr: "{value}"}}
"""


def test_a_configuration_of_ones_own_is_kept_below_the_cells_keys(tmp_path: Path) -> None:
    """What nanbisect has no setting for stands there."""
    trainer = CommandTrainer(read_preset(PRESET, "toy"))
    (tmp_path / "my.yml").write_text("datasets: [{path: x}]\nlr: 5\nsteps: 99\n")
    vocabularies = {"toy": trainer.vocabulary}
    text = "trainer: toy\nsettings: {config_file: my.yml}\nfactors: {lr: [1e-5, 2e-5]}\n"
    matrix = read_matrix(text, source="m.yaml", folder=str(tmp_path), vocabularies=vocabularies)
    launched(matrix, tmp_path, trainer=trainer)
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert data == {"datasets": [{"path": "x"}], "lr": 1e-5, "steps": 3, "out": str(tmp_path), "old": 1}
    (tmp_path / "my.yml").write_text("- 1\n")
    with pytest.raises(UsageError, match="no mapping"):
        launched(matrix, tmp_path, trainer=trainer)


# what is refused -------------------------------------------------------------------------------

FACTORS = "factors: {lr: [1, 2]}\n"


@pytest.mark.parametrize(
    ("text", "line", "path", "words"),
    [
        ("command: [x, '{lr}', '{stpes}']\n" + FACTORS, 2, "command[2]", "{stpes} has no value; did you mean steps?"),
        ("command: [x, '{value}']\nflags: {lr: [a]}\n" + FACTORS, 2, "command[1]", "name the setting instead"),
        ("command: [x]\nflags: {lr: [--lr, '{vlaue}']}\n" + FACTORS, 3, "flags.lr[1]", "did you mean value?"),
        (
            "command: [x]\nflags:\n  lr:\n    1: [a]\n    2: [b, '{wd}']\n" + FACTORS,
            6, "flags.lr.2[1]", "{wd} has no value",
        ),
        ("command: [x]\nflags: {lrs: [a]}\n" + FACTORS, 4, "factors.lr", "did you mean lrs?"),
        ("command: [x]\nflags: {lr: {1: [a], 3: [b]}}\n" + FACTORS, 4, "factors.lr[1]", "use one of 1, 3"),
        ("command: [x]\nflags: {steps: [a], lr: [b]}\n" + FACTORS, 3, "flags.steps", "use another name"),
        ("command: [x]\nflags: {a-b: [a], lr: [b]}\n" + FACTORS, 3, "flags.a-b", "underscores"),
        ("command: [x]\nflags: {config.lr: 1, lr: [b]}\n" + FACTORS, 3, "flags.config.lr", "lr: {config.lr:"),
        ("command: [x]\nflags: {lr: --lr}\n" + FACTORS, 3, "flags.lr", "is no template"),
        ("command: [x]\nflags: {lr: [[--lr]]}\n" + FACTORS, 3, "flags.lr[0]", "a word is one value"),
        ("command: [x]\nflags: [lr]\n" + FACTORS, 3, "flags", "mapping of settings"),
        ("command: accelerate launch {lr}\n" + FACTORS, 2, "command", "list of words"),
        ("command: [x, [y]]\n" + FACTORS, 2, "command[1]", "one value"),
        ("flags: {lr: [a]}\n" + FACTORS, None, "command", "needs a command"),
        ("command: [x]\nflags: {lr: {config.lr: 1}}\n" + FACTORS, 2, "command", "put {config}"),
        ("command: [x, '{lr}']\nrecipe: r.py\n" + FACTORS, 3, "recipe", "only trainer sft"),
        ("command: [x, '{lr}']\nrecords: [a]\n" + FACTORS, 3, "records", "only trainer sft"),
        ("command: [x, '{lr}']\nmodel: m\n" + FACTORS, 3, "model", "{model}"),
        ("command: [x, '{gpus}', '{lr}']\ngpus_per_cell: all\n" + FACTORS, 3, "gpus_per_cell", "needs a number"),
        ("command: [x, '{seed}']\nfactors: {seed: [1, 2]}\n", 3, "factors.seed", "no level"),
    ],
)  # fmt: skip
def test_a_bad_command_is_refused_at_its_line(text: str, line: int | None, path: str, words: str) -> None:
    """With what to write instead."""
    found = problems("trainer: command\n" + text)
    where, _, said = next(problem for problem in found if problem[1] == path)
    assert where == line
    assert words in said


def test_a_command_without_problems_has_none() -> None:
    """The cases above are refused for what they name."""
    assert read("trainer: command\ncommand: [x, '{lr}']\n" + FACTORS).command == ("x", "{lr}")


# the check -------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    """An executable file."""
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "#!{python}\nimport x\n",
        "#!/usr/bin/env python3\n",
        "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nimport x\n",
    ],
)
def test_the_python_of_a_console_script_is_found(tmp_path: Path, text: str) -> None:
    """Also behind a wrapper, and in both ways in which installers write it."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    script(tmp_path / "trl", text.replace("{python}", str(python)))
    env = {"PATH": f"{tmp_path}:{python.parent}:/usr/bin:/bin"}
    for argv in (["trl", "sft"], ["nice", "-n", "5", "trl"], [f"{tmp_path}/trl"], ["python3", "trl"]):
        assert find_python(argv, workdir=tmp_path, env=env) == python
    script(tmp_path / "run.sh", "#!/bin/sh\npython3 train.py\n")
    assert find_python(["run.sh"], workdir=tmp_path, env=env) is None


def checked(matrix: Matrix, folder: Path, trainer: Any = TRAINER) -> list[Mapping[str, Any]]:
    """The lines that the check leaves."""
    launch = trainer.check(matrix, folder=folder)
    done = subprocess.run(
        launch.argv, cwd=launch.workdir, env={**os.environ, **launch.env}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]


def command_of(word: str, more: str = "") -> str:
    return f"trainer: command\ncommand: [{word}, '{{lr}}']\n{FACTORS}{more}"


def test_the_check_tells_what_is_in_the_commands_python(tmp_path: Path) -> None:
    """Its versions, not ours."""
    environment, end = checked(read(command_of(sys.executable, "device: cpu\n"), tmp_path), tmp_path)
    assert (environment["kind"], end["kind"], end["how"]) == ("environment", "end", "done")
    assert environment["device"] == "cpu"
    assert environment["torch"][0].isdigit()
    assert {"transformers", "accelerate"} <= set(environment["packages"])


def test_a_command_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    """Before any process is started."""
    for word, said in (("no-such-trainer", "not on PATH"), ("./train.sh", "no program"), ("bin/python", "no program")):
        with pytest.raises(UsageError, match=said):
            TRAINER.check(read(command_of(word), tmp_path), folder=tmp_path)


def test_all_that_is_not_there_is_said_before_any_cell(tmp_path: Path) -> None:
    """The script of a Python program and the data; after another program a script may lie anywhere."""
    more = "data: ./train.jsonl\nmodel: ./checkpoint\n"
    text = "trainer: command\ncommand: [WORD, train.py, '{lr}', '{model}', '{data}']\n" + FACTORS
    with pytest.raises(UsageError) as caught:
        TRAINER.check(read(text.replace("WORD", sys.executable) + more, tmp_path), folder=tmp_path)
    for said in ("the script is not there", "the model './checkpoint' is not there", "the data './train.jsonl' is not"):
        assert said in str(caught.value)
    names = "data: trl-lib/Capybara\nmodel: Qwen/Qwen3-0.6B\n"
    TRAINER.check(read(text.replace("WORD", "env") + names, tmp_path), folder=tmp_path)
    TRAINER.check(read(text.replace("WORD", "env") + "data: ./*.jsonl\nmodel: a\n", tmp_path), folder=tmp_path)
    TRAINER.check(read(text.replace("WORD", "env") + "data: /in/the/container\nmodel: a\n", tmp_path), folder=tmp_path)
    (tmp_path / "train.py").touch()
    TRAINER.check(read(text.replace("WORD", sys.executable) + names, tmp_path), folder=tmp_path)


def test_a_python_without_torch_is_said(tmp_path: Path) -> None:
    """`-S` stands for an environment that holds nothing; the mend names what to do."""
    launch = TRAINER.check(read(command_of(sys.executable), tmp_path), folder=tmp_path)
    subprocess.run([sys.executable, "-S", *launch.argv[1:]], cwd=tmp_path, env={"PATH": "/bin"}, check=True)
    (end,) = map(json.loads, (tmp_path / "trainer.jsonl").read_text().splitlines())
    assert end["how"] == "bad_input"
    assert "has no torch" in end["text"]
    assert "try: activate" in end["text"]


def test_an_old_torch_is_said(tmp_path: Path) -> None:
    """From its own text: nothing is imported, and the metadata of another torch further on does not count."""
    package = tmp_path / "lib" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text("__all__ = ['__version__']\n__version__ = '2.0.1+cpu'\n")
    matrix = read(command_of(sys.executable, "env: {PYTHONPATH: lib}\n"), tmp_path)
    (end,) = checked(matrix, tmp_path)
    assert end["how"] == "bad_input"
    assert "torch 2.0.1+cpu" in end["text"]
    assert "2.1" in end["text"]


def test_a_flag_that_the_installed_trainer_lacks_is_said_before_any_cell(tmp_path: Path) -> None:
    """It is looked for in the trainer's sources, in the command's own Python."""
    text = """\
command: [PYTHON, "{script}"]
forced: [--known-one, a, --new-name|--old_name, b]
parsers: ["{script}"]
settings:
  script: {summary: path, default: sft.py}
  lr: {summary: rate, flags: [--lr, "{value}"]}
  kernel: {summary: kernel, flags: {a: [], b: [--lr, "1"]}, needs: {b: no_such_package|nor_this}}
""".replace("PYTHON", sys.executable)
    trainer = CommandTrainer(read_preset(text, "toy"))
    matrix = read_matrix(
        "trainer: toy\ndevice: cpu\nfactors: {lr: [1, 2], kernel: [a, b]}\n",
        source="m.yaml", folder=str(tmp_path), vocabularies={"toy": trainer.vocabulary},
    )  # fmt: skip
    with pytest.raises(UsageError, match="the script is not there"):
        trainer.check(matrix, folder=tmp_path)
    (tmp_path / "sft.py").write_text("p.add_argument('--known-one')\np.add_argument('--old-name')\n")
    *_, end = checked(matrix, tmp_path, trainer)
    assert end["how"] == "bad_input"
    assert "no lr (looked in" in end["text"]
    (tmp_path / "trainer.jsonl").unlink()
    (tmp_path / "sft.py").write_text("class A:\n    known_one: int\n    lr: float\n    new_name: str\n")
    _, level, end = checked(matrix, tmp_path, trainer)
    assert (level["setting"], level["level"], end["how"]) == ("kernel", "b", "done")
    assert "no_such_package or nor_this" in level["reason"]


def test_the_check_needs_nothing_but_the_standard_library() -> None:
    """It runs in other people's interpreters."""
    done = subprocess.run([sys.executable, "-I", "-S", str(INSTALLED), "--help"], capture_output=True, check=False)
    assert b"ModuleNotFoundError" not in done.stderr


# effect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "nested", "recomputed", "fails"),
    [
        ("off", 0, 0, False), ("off", 0, 2, True), ("on", 0, 2, False), ("on", 0, 0, True),
        ("reentrant", 2, 2, False), ("reentrant", 0, 2, True), ("every_other_layer", 0, 2, False),
    ],
)  # fmt: skip
def test_checkpointing_that_did_not_happen_is_not_judged(level: str, nested: int, recomputed: int, fails: bool) -> None:
    """The name has a meaning where its level is one that nanbisect knows."""
    matrix = Matrix("m", "command", ())
    seen = {"nested": nested, "recomputed": recomputed, "kernels": {}}
    effect = TRAINER.effect(matrix, Cell(1, {"gradient_checkpointing": level}), seen)
    assert (effect.failed is not None) == fails


def test_another_attention_is_a_doubt_only() -> None:
    """Its code is the user's own."""
    matrix = Matrix("m", "command", ())
    for level, kernels, doubts in (
        ("eager", {"SoftmaxBackward0": 2}, 0),
        ("eager", {"ScaledDotProductFlashAttentionForCpuBackward0": 2}, 1),
        ("sdpa", {"SoftmaxBackward0": 2}, 1),
        ("sdpa", {}, 0),
        ("mine", {"SoftmaxBackward0": 2}, 0),
    ):
        effect = TRAINER.effect(matrix, Cell(1, {"attention": level}), {"kernels": kernels})
        assert (effect.failed, len(effect.doubts)) == (None, doubts)


def test_a_precision_that_nothing_was_cast_to() -> None:
    """A script that ignores it: as a factor it can't be judged, and what all cells share is a doubt."""
    full, cast = {"parameter_dtypes": {"float32": 9}, "casts": 0}, {"parameter_dtypes": {"float32": 9}, "casts": 4}
    halves, hidden = {"parameter_dtypes": {"bfloat16": 9}, "casts": 0}, {**full, "casts": None}
    for level, resolved, seen in (
        ("bf16", full, True), ("fp16", full, True), ("fp32", full, False), ("bf16", cast, False),
        ("bf16", halves, False), ("bf16", hidden, False), ("bf16", {}, False),
    ):  # fmt: skip
        varied = TRAINER.effect(Matrix("m", "command", ()), Cell(1, {"precision": level}), resolved)
        assert ((varied.failed is not None), varied.doubts) == (seen, ())
        fixed = TRAINER.effect(Matrix("m", "command", (), settings={"precision": level}), Cell(1, {}), resolved)
        assert (fixed.failed, [note.code for note in fixed.doubts]) == (None, ["precision_otherwise"] * seen)


# a real run ------------------------------------------------------------------------------------

SCRIPT = """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--sqrt-loss", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps + 5):
    rows = torch.randn(args.batch, 4)
    error = (model(rows) - rows.sum(1, keepdim=True)) ** 2
    if args.sqrt_loss:  # the square root of an exact zero has an infinite slope, times zero
        error = (error * 0).sqrt()
    loss = error.mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "loss", loss.item())
"""
MATRIX = """\
name: plain
trainer: command
command: [PYTHON, train.py, --steps, "{steps}"]
device: cpu
steps: 2
flags:
  batch_size: [--batch, "{value}"]
  sqrt_loss: {off: [], on: [--sqrt-loss]}
factors:
  sqrt_loss: [off, on]
  batch_size: [1, 2]
"""


@pytest.mark.training
def test_a_plain_script_in_real_processes(tmp_path: Path) -> None:
    """Unmodified; stopped after its steps; the flag that brings the NaN is the cause and the batch is not."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.yaml").write_text(MATRIX.replace("PYTHON", sys.executable))
    done = nanbisect("run", "plain.yaml", "--out", "out", cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    data = result(tmp_path / "out")
    statuses = {cell["id"]: cell["status"] for cell in data["cells"]}
    assert statuses == {
        f"batch_size={batch},sqrt_loss={flag}": "nonfinite" if flag == "on" else "finite"
        for batch in (1, 2)
        for flag in ("off", "on")
    }
    assert [cause["levels"] for cause in data["causes"]] == [{"sqrt_loss": ["on"]}]
    assert data["causes"][0]["standing"] == "proved"
    assert data["neutral"] == ["batch_size"]
    assert all(cell["site"] is None or cell["site"]["step"] == 1 for cell in data["cells"])
