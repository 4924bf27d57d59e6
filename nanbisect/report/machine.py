"""What ran it, in rows: device, hardware and versions, from whatever the environment says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanbisect.matrix import ANY_LEVEL, Expansion, Matrix
from nanbisect.matrix_command import shown
from nanbisect.report.inputs import RunInputs
from nanbisect.report.words import one_line

KNOWN = ("device", "gpus", "cpu", "system", "python", "torch", "cuda", "packages", "nanbisect")
NAMES = {"nanbisect": "nanbisect", "python": "Python", "torch": "torch", "cuda": "CUDA"}
SHOWN_VERSIONS = ("transformers", "accelerate")
GIB = 1 << 30
SETTINGS_SHOWN = (
    "attention", "gradient_checkpointing", "batch_size", "gradient_accumulation", "loss_reduction", "precision",
    "param_dtype", "padding_side", "max_length", "optimizer", "learning_rate", "adam_eps", "weight_decay",
    "max_grad_norm", "deterministic", "seed", "dropout",
)  # fmt: skip


def environment_rows(inputs: RunInputs) -> tuple[tuple[str, str], ...]:
    """(what, value) of everything known, the usual things first; empty values are left out."""
    given = {"device": inputs.device, **inputs.environment}
    names = [*(name for name in KNOWN if name in given), *(name for name in given if name not in KNOWN)]
    rows = ((str(name), one_line(_value(name, given[name]))) for name in names)
    return tuple((name, value) for name, value in rows if value)


def training_rows(inputs: RunInputs) -> tuple[tuple[str, str], ...]:
    """What was trained and with what: given settings, and what the others resolved to in the first cell that says."""
    matrix = inputs.matrix
    told = next((r.outcome.resolved for r in inputs.ordered if r.outcome and r.outcome.resolved), {})
    rows: dict[str, Any] = {
        "trainer": matrix.trainer,
        "recipe": matrix.recipe,
        "model": " ".join(str(told[name]) for name in ("model_class",) if told.get(name)) or matrix.model,
        "parameters": told.get("parameters"),
        "command": shown(Expansion(matrix.command)),
        "steps": f"{matrix.steps} with the largest batch; {_same(inputs)}",
    }
    rows |= {name: told[name] for name in told if name in SETTINGS_SHOWN and name not in matrix.settings}
    rows |= matrix.settings
    factors = {factor.name for factor in matrix.factors}
    rows = {name: value for name, value in rows.items() if name not in factors}
    rows |= {
        f"flags.{name}": _template(matrix, name) for name in matrix.flags if name in matrix.settings.keys() | factors
    }
    texts = ((name, one_line(_value(name, value))) for name, value in rows.items())
    return tuple((name, text) for name, text in texts if text)


def _same(inputs: RunInputs) -> str:
    """What cells have in common: a command reads its data itself."""
    if inputs.vocabulary.commands:
        return "smaller ones take more, over as many records"
    return "every cell sees the same records"


def _template(matrix: Matrix, name: str) -> str:
    """What a setting of the matrix's own becomes: `--batch-size {value}`, or by level."""
    levels = {level: shown(template) for level, template in matrix.flags[name].items()}
    if ANY_LEVEL in levels and len(levels) == 1:
        return levels[ANY_LEVEL]
    return "; ".join(f"{level}: {text or 'nothing'}" for level, text in levels.items())


def versions(inputs: RunInputs) -> str:
    """`nanbisect 0.1.0, Python 3.11.2, torch 2.13.0, transformers 4.57.1, on cpu`."""
    given, packages = inputs.environment, inputs.environment.get("packages") or {}
    found = [f"{word} {given[name]}" for name, word in NAMES.items() if given.get(name)]
    found += [f"{name} {packages[name]}" for name in SHOWN_VERSIONS if packages.get(name)]
    return one_line(", ".join([*found, f"on {inputs.device}"]))


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "gpus" and isinstance(value, Sequence) and not isinstance(value, str):
        return _gpus([_gpu(item) for item in value])
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(item) for item in value)
    return str(value)


def _gpu(item: Any) -> str:
    """`NVIDIA H200 (139 GiB)`; memory may be bytes or text."""
    if not isinstance(item, Mapping):
        return str(item)
    memory = item.get("memory")
    size = f"{memory / GIB:.0f} GiB" if isinstance(memory, int) and memory > GIB else memory
    return f"{item.get('name', 'GPU')}{f' ({size})' if size else ''}"


def _gpus(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
