"""Presets: every level expands to words that the trainer's own parser takes, both sides spelled out."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanbisect.errors import MatrixError
from nanbisect.matrix import ANY_LEVEL, Matrix, expand
from nanbisect.matrix_file import Overrides, read_matrix
from nanbisect.trainers import presets, templates
from nanbisect.trainers.command import CommandTrainer
from nanbisect.trainers.presets import Preset
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
from tests.commands import ROOT

NAMES = presets.names()
COMMANDS = {"transformers": "[python, train.py]", "accelerate-script": "[accelerate, launch, train.py]"}
FREE = {"optimizer": ["sgd", "adafactor"], "lr_scheduler": ["linear", "cosine"]}  # two names that all of them know
SWITCHES = {  # of the trainers' own parsers: flags that have no other side than being left out
    "moss-tts-local-v1.5": {"gradient_checkpointing", "skip_nonfinite_batches"},
}
EXPECTED = {
    "transformers": {"--logging_nan_inf_filter": "false", "--report_to": "none", "--save_strategy": "no"},
    "trl": {"--logging_nan_inf_filter": "false", "--report_to": "none", "--logging_steps": "1", "--max_steps": "2"},
    "ms-swift": {"--logging_nan_inf_filter": "false", "--report_to": "none", "--max_steps": "2", "--seed": "3"},
    "moss-tts-local-v1.5": {"--max-train-steps": "3", "--seed": "3"},
}


def matrix_of(preset: str, factors: str, more: str = "", folder: Path = ROOT) -> Matrix:
    """A matrix of that preset."""
    command = f"command: {COMMANDS[preset]}\n" if preset in COMMANDS else ""
    text = f"trainer: {preset}\n{command}steps: 2\nfactors: {factors}\n{more}"
    return read_matrix(text, source="m.yaml", folder=str(folder), vocabularies=VOCABULARIES)


def levels_of(preset: Preset, name: str) -> list[str]:
    """Two levels of a setting or more."""
    levels = [level for level in preset.flags[name] if level != ANY_LEVEL]
    if ANY_LEVEL not in preset.flags[name]:
        return levels
    return [*levels, *FREE.get(name, ["2", "4"])]


def launches(preset: Preset, folder: Path) -> list[tuple[str, dict[str, str], Any]]:
    """Setting, the cell's levels and the launch, for each level of each setting."""
    trainer, found = TRAINERS[preset.name], []
    for name in preset.flags:
        listed = ", ".join(f'"{level}"' for level in levels_of(preset, name))
        matrix = matrix_of(preset.name, f"{{{name}: [{listed}]}}", folder=folder)
        for cell in expand(matrix):
            cell_folder = folder / f"{name}-{cell.number}"
            cell_folder.mkdir()
            found.append((name, dict(cell.levels), trainer.launch(matrix, cell, seed=3, folder=cell_folder)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_level_says_something_of_its_own(name: str, tmp_path: Path) -> None:
    """No level is the absence of a flag, but where the parser has nothing else; no placeholder is left."""
    preset = presets.load(name)
    seen: dict[str, list[Any]] = {}
    for setting, levels, launch in launches(preset, tmp_path):
        words = [word.replace(str(tmp_path), "") for word in launch.argv]
        assert not [word for word in words if "{" in word and '"' not in word], words
        config = next((yaml.safe_load(Path(word).read_text()) for word in launch.argv if word.endswith(".yaml")), None)
        if config:
            config.pop("output_dir")
        own = [part for part in templates.expand_flags(preset.flags, levels)]
        spelled = any(part.words or part.config for part in own)
        assert spelled or setting in SWITCHES.get(name, set()), (setting, levels)
        cell = f"{setting}-"
        seen.setdefault(setting, []).append(([word for word in words if cell not in word], config))
    for setting, found in seen.items():
        assert all(one != other for one, other in itertools.combinations(found, 2)), setting


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_of_a_switch_use_the_same_flags(name: str) -> None:
    """What `on` turns on, `off` turns off: a default that depends on the machine never decides."""
    preset = presets.load(name)
    for setting, levels in preset.flags.items():
        if {"on", "off"} <= set(levels) and setting not in SWITCHES.get(name, set()):
            on, off = ({name[0] for name in templates.flag_names([levels[level]])} for level in ("on", "off"))
            assert off <= on, setting
            assert off, setting


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_is_forced_is_there_and_last(name: str, tmp_path: Path) -> None:
    """NaN filter off, every step logged, nothing saved, no trackers, few steps, the attempt's seed."""
    matrix = matrix_of(name, "{batch_size: [1, 2]}", folder=tmp_path)
    launch = TRAINERS[name].launch(matrix, expand(matrix)[1], seed=3, folder=tmp_path)
    pairs = dict(itertools.pairwise(launch.argv))
    expected = {**EXPECTED[name]}
    assert {flag: pairs.get(flag) for flag in expected} == expected
    forced = [word for word in presets.load(name).forced.words if word.startswith("--")]
    assert [word for word in launch.argv if word.startswith("--")][-len(forced) :] == forced


@pytest.mark.parametrize("name", ["llamafactory", "axolotl"])
def test_what_is_forced_is_in_the_configuration(name: str, tmp_path: Path) -> None:
    """Over what one's own file says."""
    (tmp_path / "my.yaml").write_text("max_steps: 9999\nsave_strategy: steps\ntemplate: qwen\n")
    matrix = matrix_of(name, "{learning_rate: [1e-5, 2e-5]}", "settings: {config_file: my.yaml}\n", tmp_path)
    launch = TRAINERS[name].launch(matrix, expand(matrix)[0], seed=3, folder=tmp_path)
    data = yaml.safe_load(Path(launch.argv[2]).read_text())
    assert launch.argv[1] == "train"
    expected = {"max_steps": 2, "save_strategy": "no", "template": "qwen", "learning_rate": 1e-5, "seed": 3}
    assert {key: data[key] for key in expected} == expected
    assert "logging_nan_inf_filter" not in data or data["logging_nan_inf_filter"] is False


def test_the_command_of_a_matrix_takes_the_place_of_the_presets(tmp_path: Path) -> None:
    """The preset's words follow; flags of the matrix's own come before what is forced."""
    more = (
        "command: [accelerate, launch, '{script}', --n-vq, '{n}']\nsettings: {n: 12}\nflags: {wd: [--wd, '{value}']}\n"
    )
    matrix = matrix_of("moss-tts-local-v1.5", "{batch_size: [1, 2], wd: [0, 1]}", more, tmp_path)
    argv = TRAINERS["moss-tts-local-v1.5"].launch(matrix, expand(matrix)[1], seed=0, folder=tmp_path).argv
    assert argv[:5] == ("accelerate", "launch", "moss_tts_local_v1.5/finetuning/sft.py", "--n-vq", "12")
    assert argv.index("--per-device-batch-size") < argv.index("--wd") < argv.index("--max-train-steps")


def test_launcher_flags_go_to_the_launcher(tmp_path: Path) -> None:
    """And the script's own to the script."""
    more = "flags: {lr: [--lr, '{value}']}\n"
    matrix = matrix_of("accelerate-script", "{precision: [fp32, bf16], lr: [1, 2]}", more, tmp_path)
    argv = TRAINERS["accelerate-script"].launch(matrix, expand(matrix)[3], seed=0, folder=tmp_path).argv
    assert argv[:4] == ("accelerate", "launch", "--mixed_precision", "bf16")
    assert argv[-3:] == ("train.py", "--lr", "2")
    two = matrix_of("accelerate-script", "{processes: [1, 2]}", "", tmp_path)  # two processes see twice as many records
    steps = [
        TRAINERS["accelerate-script"].launch(two, cell, seed=0, folder=tmp_path).env["NANBISECT_STEPS"]
        for cell in expand(two)
    ]
    assert steps == ["4", "2"]
    assert "--main_process_port" in argv[: argv.index("train.py")]
    with pytest.raises(MatrixError, match="after the word launch"):
        read_matrix(
            "trainer: accelerate-script\ncommand: [python, train.py]\nfactors: {precision: [fp32, bf16]}\n",
            source="m.yaml", folder=".", vocabularies=VOCABULARIES,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "factors", "words"),
    [
        ("trl", "{batchsize: [1, 2]}", "did you mean batch_size?"),
        ("trl", "{attention: [sdpa, flsh]}", "did you mean flash?"),
        ("transformers", "{attention: [sdpa, eager]}", "or map attention under flags"),
        ("ms-swift", "{batch_size: [1, none]}", "a whole number of at least 1"),
        ("moss-tts-local-v1.5", "{channel_weights: [1,8, 1,32]}", "quote each level"),
    ],
)
def test_unknown_settings_and_levels_are_refused(preset: str, factors: str, words: str) -> None:
    """With a suggestion, before anything runs."""
    with pytest.raises(MatrixError) as caught:
        matrix_of(preset, factors)
    assert words in str(caught.value)


def test_a_preset_is_read_when_it_is_asked_for() -> None:
    """There are many, and most commands need one at most."""
    code = """
        from nanbisect.trainers import presets
        read, load = [], presets.load
        presets.load = lambda name: read.append(name) or load(name)
        from nanbisect import app
        from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
        assert "batch_size" in VOCABULARIES["sft"].settings and "trl" in VOCABULARIES and "nothing" not in TRAINERS
        assert not read
        assert VOCABULARIES["trl"].settings and TRAINERS["trl"] is TRAINERS["trl"]
        assert read == ["trl"], read
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_bad_preset_says_all_that_is_wrong() -> None:
    """Presets are read with the reader of matrices."""
    with pytest.raises(MatrixError) as caught:
        presets.read("comand: [x]\nsettings: {lr: {kind: real, flags: 3}, a: 1, b: {neutrl: true}}\n", "toy")
    for word in ("comand", "kind 'real'", "no template", "settings.a", "neutrl"):
        assert word in str(caught.value)


def test_the_matrix_of_the_issue() -> None:
    """36 cells on a real checkpoint, the settings of issue 196."""
    path = ROOT / "matrices" / "moss-tts-local-v1.5.yaml"
    overrides = Overrides(model="/some/where", data="/some/train.jsonl", settings=("script=/r/sft.py",))
    matrix = read_matrix(
        path.read_text(), source=str(path), folder=str(path.parent), vocabularies=VOCABULARIES, overrides=overrides
    )
    assert len(expand(matrix)) == 36
    assert matrix.baseline["attention"] == "sdpa"
    assert presets.load("moss-tts-local-v1.5").needs["attention"] == {"flash": "flash_attn"}  # its own code imports it
    walk = re.findall(r"^#   \d\. .*--set (\w+)=", path.read_text(), re.M)
    assert walk == ["gradient_checkpointing", "batch_size", "channel_weights", "attention"]


# the real parsers ------------------------------------------------------------------------------


@pytest.fixture
def our_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python` and `trl` are those of this environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def parsed(preset: str, classes: Any, folder: Path) -> list[tuple[str, dict[str, str], list[Any]]]:
    """What HfArgumentParser makes of each level; every word must be taken."""
    from transformers import HfArgumentParser

    found = []
    for setting, levels, launch in launches(presets.load(preset), folder):
        words = list(launch.argv[len(TRAINERS[preset].preset.command) or 2 :])  # type: ignore[attr-defined]
        parser = HfArgumentParser(classes)
        namespace, rest = parser.parse_known_args(words)
        assert rest == [], (setting, levels, rest)
        found.append((setting, levels, [namespace]))
    return found


@pytest.mark.usefixtures("our_python")
def test_the_transformers_preset_against_the_installed_parser(tmp_path: Path) -> None:
    """Each flag is there, and takes the value; the names are those that this version has."""
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    found = parsed("transformers", (TrainingArguments,), tmp_path)
    assert found
    for setting, levels, (namespace,) in found:
        assert namespace.logging_nan_inf_filter is False
        assert (namespace.seed, namespace.logging_steps, namespace.save_strategy) == (3, 1, "no")
        assert namespace.max_steps in (2, 4)  # the smaller of two batches takes twice as many
        if setting == "gradient_checkpointing":
            assert getattr(namespace, name) is (levels[setting] != "off")
            kwargs = getattr(namespace, f"{name}_kwargs")
            assert levels[setting] == "off" or ("true" in str(kwargs)) is (levels[setting] == "reentrant")
        if setting == "precision":
            assert (namespace.bf16, namespace.fp16) == (levels[setting] == "bf16", levels[setting] == "fp16")


@pytest.mark.usefixtures("our_python")
def test_the_trl_preset_against_the_parser(tmp_path: Path) -> None:
    """Where trl is installed (not in CI)."""
    trl = pytest.importorskip("trl")
    found = parsed("trl", (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig), tmp_path)
    for setting, levels, (namespace,) in found:
        if setting == "gradient_checkpointing":
            assert namespace.gradient_checkpointing is (levels[setting] != "off")
        if setting == "attention":
            assert namespace.attn_implementation.startswith(levels[setting][:4])


def test_names_of_other_versions(tmp_path: Path) -> None:
    """The installed trainer decides; without one, the older name."""
    words = ("--activation_checkpointing|--gradient_checkpointing", "true", "a|b")
    new, old = frozenset({"activation_checkpointing", "gradient_checkpointing"}), frozenset({"gradient_checkpointing"})
    assert templates.resolved_names(words, lambda: new)[0] == "--activation_checkpointing"
    assert templates.resolved_names(words, lambda: old) == ("--gradient_checkpointing", "true", "a|b")
    assert templates.resolved_names(words, frozenset)[0] == "--gradient_checkpointing"
    assert isinstance(TRAINERS["trl"], CommandTrainer)
