"""`init`: the matrix that it writes for every trainer reads back, says what to fill in, and then works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect import app as application
from nanbisect.errors import UsageError
from nanbisect.matrix import Matrix, expand
from nanbisect.matrix_file import read_matrix
from nanbisect.suspects import CLASHES, SUSPECTS, USUAL, levels_for
from nanbisect.trainers.command import CommandTrainer
from nanbisect.trainers.presets import read as read_preset
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
from nanbisect.trainers.sft.settings import RECIPES
from nanbisect.trainers.starter_text import starter_text, word
from nanbisect.trainers.starters import MOST_CELLS, command_starter, starter_for, starters
from nanbisect.yaml_tree import Findings, Scalar, parse_tree
from tests.commands import nanbisect, result

STARTERS = starters()
NAMES = sorted(STARTERS)


def text_of(name: str) -> str:
    """What `init NAME` writes."""
    return starter_text(STARTERS[name], name=name, file=f"{name}.yaml")


def read(name: str, folder: Path | str = ".") -> Matrix:
    """The matrix that `init NAME` writes into a folder."""
    return read_matrix(text_of(name), source=f"{name}.yaml", folder=str(folder), vocabularies=VOCABULARIES)


def test_there_is_one_for_every_trainer_and_recipe() -> None:
    """A new preset or recipe has one by being there."""
    assert set(STARTERS) == {*TRAINERS, *RECIPES}


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_back_without_a_problem(name: str) -> None:
    """As many cells as it says, few enough to run, each factor's safe level first."""
    matrix, starter = read(name), STARTERS[name]
    assert (matrix.name, matrix.trainer) == (name, starter.trainer)
    assert 4 <= len(expand(matrix)) == starter.cells <= MOST_CELLS
    assert f"{starter.cells} cells" in text_of(name)
    for factor in matrix.factors:
        known = VOCABULARIES[matrix.trainer].settings.get(factor.name) or starter.vocabulary.settings[factor.name]
        assert factor.levels == levels_for(factor.name, known)
    assert {**matrix.settings, **{factor.name: "" for factor in matrix.factors}}.keys() >= starter.settings.keys()


@pytest.mark.parametrize("name", NAMES)
def test_it_says_why_and_what_next(name: str) -> None:
    """A reason a factor, every setting of the trainer with what it becomes, the next commands."""
    lines = text_of(name).splitlines()
    text = " ".join(line.strip(" #") for line in lines)
    for factor in STARTERS[name].suspects:
        assert SUSPECTS[factor.name].why in text
    for setting, known in STARTERS[name].vocabulary.settings.items():
        assert any(line.startswith(f"# {setting}: {known.summary}"[:60]) for line in lines) or name == "command"
    for command in ("plan", "run"):
        assert f"#     nanbisect {command} {name}.yaml" in text_of(name)
    assert "nanbisect watch -- " in text
    for key in ("records:", "workdir:", "env:", "exclude:", "repeat:", "<-- "):
        assert key in text
    assert not [line for line in lines if len(line) > 120 and "reentrant" not in line]


def test_what_a_preset_makes_of_its_settings_is_shown() -> None:
    """As words, as keys of a configuration, and what is always there."""
    assert "#   flash   --attn_implementation flash_attention_2\n" in text_of("trl")
    assert "--max_steps {steps} --seed {seed} --logging_nan_inf_filter false" in text_of("trl").replace("\n#   ", " ")
    assert "#   off        config.disable_gradient_checkpointing: true\n" in text_of("llamafactory")
    assert "#   off        nothing\n" in text_of("moss-tts-local-v1.5")


# filling in ------------------------------------------------------------------------------------

PROGRAMS = ("accelerate", "trl", "swift", "axolotl", "llamafactory-cli")
SAID = {
    "model": "the model",
    "data": "the data",
    "recipe": "the recipe",
    "command": "the script",
    "script": "the script",
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH on which every trainer is a console script of this Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for name in PROGRAMS:
        path = tmp_path / "bin" / name
        path.write_text(f"#!{sys.executable}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_missing_is_said_at_once_and_then_it_works(name: str, tmp_path: Path) -> None:
    """What is marked, and nothing else; with it there, every cell has its command."""
    trainer, asks = TRAINERS[STARTERS[name].trainer], STARTERS[name].asks
    with pytest.raises(UsageError) as caught:
        trainer.check(read(name, tmp_path), folder=tmp_path)
    said = str(caught.value)
    assert said.count("try:") == len(asks)
    for key in asks:
        assert SAID.get(key, "the configuration") in said
    for key, example in asks.items():
        path = tmp_path / ("train.py" if key == "command" else example)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("") if path.suffix else path.mkdir()
        if key == "config_file":
            path.write_text("template: qwen\n")
    matrix = read(name, tmp_path)
    trainer.check(matrix, folder=tmp_path)
    for cell in expand(matrix):
        launch = trainer.launch(matrix, cell, seed=1, folder=tmp_path)
        assert not [text for text in launch.argv if "{" in text and '"' not in text]


def test_a_name_is_no_path_and_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--train-jsonl takes what the trainer's own data may be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def data(text: str) -> Any:
        return application.overrides(None, text, (), ()).data

    assert data("trl-lib/Capybara") == "trl-lib/Capybara"
    assert data("identity") == "identity"
    for text in ("here", "nope.jsonl", "./nope", "/nope"):
        assert data(text) == str((tmp_path / text).resolve())


# no drift --------------------------------------------------------------------------------------

TOY = """\
about: |
  a toy
  with a note
command: [toy]
settings:
  packing: {summary: rows, flags: {off: [--no-pack], on: [--pack]}}
  attention: {summary: kernel, flags: {eager: [--eager], flash: [--flash]}}
  batch_size: {summary: rows, flags: [--batch, "{value}"]}
  optimizer: {summary: name, flags: [--optim, "{value}"]}
"""


def test_a_new_preset_needs_no_template() -> None:
    """Its suspects are found by name, with the levels that it has, and so are its notes."""
    trainer = CommandTrainer(read_preset(TOY, "toy"))
    starter = command_starter("toy", trainer)
    text = starter_text(starter, name="toy", file="toy.yaml")
    matrix = read_matrix(text, source="toy.yaml", folder=".", vocabularies={"toy": trainer.vocabulary})
    factors = {factor.name: factor.levels for factor in matrix.factors}
    assert factors == {"batch_size": ("1", "2", "8"), "attention": ("eager", "flash")}
    assert "# with a note\n" in text
    assert "  # packing: [off, on] " in text
    assert "#   off  --no-pack\n" in text


def test_every_suspect_is_known_to_some_trainer() -> None:
    """With levels that it takes; one that nobody has was renamed or misspelled."""
    known = [starter.vocabulary.settings for starter in STARTERS.values()]
    for name, suspect in SUSPECTS.items():
        takers = [settings[name] for settings in known if name in settings]
        assert takers, name
        assert all(any(setting.takes(level) for setting in takers) for level in suspect.levels), name
    for name, level in USUAL.items():
        assert any(name in settings and settings[name].takes(level) for settings in known)
    for rule, _ in CLASHES:
        assert all(level in SUSPECTS[name].levels for name, level in rule.items())


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12))
def test_any_text_is_written_so_that_it_reads_back(text: str) -> None:
    """In a list, in a mapping, alone; also what YAML readers disagree about."""
    for case in (text, f"0{text}", "yes", "010", "~", "-", "1,8", "{value}", "null", "a: b", "a #b"):
        findings = Findings()
        tree = parse_tree(f"a: {word(case)}\nb: [{word(case)}]\nc: {{d: {word(case)}}}\n", findings)
        a, b, c = tree["a"], tree["b"], tree["c"]
        assert isinstance(a, Scalar)
        assert isinstance(b, list)
        assert isinstance(c, dict)
        assert {a.text, *(item.text for item in (*b, c["d"]) if isinstance(item, Scalar))} == {case}
        assert findings.problems == ()


# the command -----------------------------------------------------------------------------------


def test_it_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not over a file that is there, unless told so."""
    monkeypatch.chdir(tmp_path)
    application.init("trl", out=None, force=False)
    told = capsys.readouterr().out
    assert "wrote trl.yaml: 30 cells over gradient_checkpointing, batch_size, attention, precision" in told
    assert "(model, data)" in told
    assert (tmp_path / "trl.yaml").read_text() == text_of("trl")
    (tmp_path / "trl.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"trl\.yaml is there already\ntry: --force"):
        application.init("trl", out=None, force=False)
    assert (tmp_path / "trl.yaml").read_text() == "mine"
    application.init("trl", out=None, force=True)
    assert (tmp_path / "trl.yaml").read_text() == text_of("trl")
    application.init("trl", out=Path("my run.yaml"), force=False)
    assert "nanbisect plan 'my run.yaml'" in (tmp_path / "my run.yaml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"trl.yaml", "my run.yaml"}


@pytest.mark.parametrize(
    ("name", "out", "words"),
    [
        ("causal_lm", None, "did you mean causal-lm?"),
        ("no-such-thing", None, "one of causal-lm, sft, command, accelerate-script"),
        ("trl", "no/such.yaml", "there is no folder no"),
        ("trl", ".", "is a folder"),
        (None, "x.yaml", "no preset was named"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str | None, out: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something to try; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        application.init(name, out=None if out is None else Path(out), force=False)
    assert words in str(caught.value)
    assert "try:" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_without_a_name_it_lists_them(tmp_path: Path) -> None:
    """One line each."""
    listed = nanbisect("init", cwd=tmp_path)
    assert listed.code == 0
    for name, starter in STARTERS.items():
        assert any(line.split()[:1] == [name] and starter.about[0] in line for line in listed.out.splitlines())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("trl sft --model x", "trl"),
        ("/opt/env/bin/swift sft", "ms-swift"),
        ("accelerate launch --num_processes 2 train.py", "accelerate-script"),
        ("llamafactory-cli train x.yaml", "llamafactory"),
        ("trl dpo", "command"),
        ("python train.py", "command"),
        ("torchrun train.py", "command"),
    ],
)
def test_a_watched_command_is_told_its_preset(command: str, name: str) -> None:
    """By how it starts; any other is a plain command."""
    assert starter_for(command.split()) == name


SNIPPET = """
import sys
from nanbisect.cli import app
try:
    app(["init", "causal-lm", "--out", "-"])
except SystemExit:
    pass
print("HEAVY", sorted(set(sys.modules) & {"torch", "transformers", "accelerate", "pandas"}), file=sys.stderr)
"""


def test_it_starts_nothing_heavy(tmp_path: Path) -> None:
    """No training library, and nothing is written."""
    done = subprocess.run(
        [sys.executable, "-c", SNIPPET], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert "trainer: sft" in done.stdout
    assert "HEAVY []" in done.stderr
    assert not list(tmp_path.iterdir())


SCRIPT = """\
import argparse
import torch
parser = argparse.ArgumentParser()
for name in ("--max-steps", "--seed", "--batch-size"):
    parser.add_argument(name, type=int)
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--attention")
parser.add_argument("--gradient-checkpointing", action="store_true")
args = parser.parse_args()
torch.manual_seed(args.seed)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
for step in range(args.max_steps):
    loss = model(torch.randn(args.batch_size, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.training
def test_a_script_with_these_flags_needs_no_edit(tmp_path: Path) -> None:
    """`init` and `run`, with fewer cells."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert nanbisect("init", "command", "--out", "mine.yaml", cwd=tmp_path).code == 0
    fewer = ("--set", "attention=sdpa", "--set", "gradient_checkpointing=off", "--factor", "batch_size=1|2")
    done = nanbisect("run", "mine.yaml", "--out", "out", "--device", "cpu", *fewer, cwd=tmp_path, env=env)
    assert done.code == 0, done.out + done.err
    assert result(tmp_path / "out")["counts"] == {"finite": 2}
