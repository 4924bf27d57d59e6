"""Documents are executed: commands, matrices, the exit-code table and the links of the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from nanbisect import app as application
from nanbisect.cli import app
from nanbisect.matrix import Matrix, expand
from nanbisect.matrix_file import NO_OVERRIDES
from nanbisect.trainers.registry import VOCABULARIES
from tests.commands import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
SHELL = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines() if line.strip()]
MATRICES = sorted((ROOT / "matrices").glob("*.yaml"))


def commands() -> list[list[str]]:
    """Every `nanbisect ...` of the README, as words without comments."""
    found = [re.search(r"nanbisect (run|plan|init|rerun|report|watch|doctor|--).*", line) for line in SHELL]
    return [shlex.split(match[0], comments=True) for match in found if match]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_readme_exist(words: list[str]) -> None:
    """Each parses: the command, its options and its files are there."""
    group = get_command(app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], list(words[2:]), resilient_parsing=False)
    for word in words[2:]:
        if word.startswith("matrices/"):
            assert (ROOT / word).is_file()


def test_the_readme_has_the_two_commands_that_set_all_up() -> None:
    """.ci/run takes the second from here."""
    demo, tests = (re.search(rf"<!-- {name} -->\n```sh\n(.+)\n```", README) for name in ("demo", "tests"))
    assert demo
    assert tests
    assert demo[1].endswith("-e . && .venv/bin/nanbisect run matrices/demo.yaml")
    assert tests[1].endswith("-e '.[dev]' && .venv/bin/python -m tests")
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()


def test_links_of_the_readme_lead_somewhere() -> None:
    """Relative links are files of this repository."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_the_exit_codes_of_the_readme_are_those_of_the_command() -> None:
    """The table and the help say the same."""
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.M)}
    assert table == {0, 1, 2, 3, 130}


def test_the_settings_of_the_readme_are_those_of_the_trainer() -> None:
    """A setting that nobody documented, or that nobody has, fails here."""
    table = README.split("| setting | levels |")[1].split("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert named == set(VOCABULARIES["sft"].settings)


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.name)
def test_every_matrix_can_be_read(path: Path) -> None:
    """And has cells, and a comment that says how to run it."""
    matrix = application.load(path, NO_OVERRIDES)
    assert isinstance(matrix, Matrix)
    assert expand(matrix)
    assert f"nanbisect run matrices/{path.name}" in path.read_text()


def test_the_matrices_of_the_readme_can_be_read() -> None:
    """The examples are whole matrices."""
    from nanbisect.matrix_file import read_matrix

    texts = [text for language, text in BLOCKS if language == "yaml"]
    matrices = [read_matrix(text, source="README.md", folder=".", vocabularies=VOCABULARIES) for text in texts]
    assert [len(expand(matrix)) for matrix in matrices] == [36, 4]


def test_nothing_of_this_machine_is_in_the_example_run() -> None:
    """The committed run is redacted."""
    for path in (path for path in (ROOT / "reports" / "demo-example").rglob("*") if path.is_file()):
        text = path.read_text()
        assert not re.search(r"/(home|root|work|tmp|Users)/", text), path


FLAGS = {
    "run": {
        "--model-path", "--train-jsonl", "--set", "--factor", "--steps", "--repeat", "--seed", "--timeout", "--device",
        "--gpus", "--jobs", "--cold", "--no-check", "--no-trace", "--keep-model", "--strategy", "--strength",
        "--budget", "--finish-grid", "--resume", "--out", "--help",
    },
    "plan": {
        "--model-path", "--train-jsonl", "--set", "--factor", "--steps", "--device", "--strategy", "--strength",
        "--schema", "--help",
    },
    "init": {"--out", "--force", "--help"},
    "rerun": {"--repeat", "--with", "--trace", "--help"},
    "watch": {"--steps", "--stop", "--trace", "--json", "--help"},
    "report": {"--format", "--redact", "--help"},
    "doctor": {"--python", "--json", "--help"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_the_flags_are_these(name: str) -> None:
    """Adding one is a decision."""
    group = get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, [], resilient_parsing=True)
    found = {
        option for parameter in command.get_params(context) for option in parameter.opts if option.startswith("--")
    }
    assert found == FLAGS[name]


@pytest.mark.parametrize(("format_", "name"), [("md", "report.md"), ("csv", "results.csv"), ("json", "result.json")])
def test_the_example_run_renders_as_committed(format_: str, name: str) -> None:
    """A report is built from the files of a run alone, the same at any time and on any machine."""
    built = application.report("demo-example", format_, redact=True, reports=ROOT / "reports")
    assert built == (ROOT / "reports" / "demo-example" / name).read_text()
