"""The floors: who imports whom, what stays light, and that the probe stands alone. Read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanbisect

PACKAGE = Path(nanbisect.__file__).parent
HEAVY = {"torch", "transformers", "accelerate", "pandas", "matplotlib", "jinja2", "numpy"}
LOOK = "environment/look.py"  # the doctor's, which runs in the Python that trains
TRAINING = ("trainers/sft/", "probe/", "executors/warm/launcher.py", LOOK)  # what runs in the training process
COUNTING = ("search/",)  # needs numpy; its door, `search/propose.py`, imports it when it is first opened
DOOR = ("search/__init__.py", "search/values.py", "search/space.py", "search/propose.py")
PURE = (
    "environment/row.py",
    "environment/levels.py",
    *(f"environment/{n}rows.py" for n in ("", "torch_", "machine_", "attention_")),
)
FLOORS = (
    ("errors", "matrix", "cells", "outcome", "events"),
    (
        *(
            "yaml_tree",
            "matrix_flags",
            "matrix_shape",
            "matrix_command",
            "matrix_check",
            "matrix_file",
            "matrix_schema",
            "suspects",
            "causes",
        ),
        *(
            "presence",
            "ranks",
            "evidence",
            "sightings",
            "judging",
            "origins",
            "neutrality",
            "combinations",
            "confirm",
            "attribution",
            "search",
            "schedule",
            "slots",
            "tables",
            "report",
        ),
    ),
    ("executors", "gpus", "ports", "store", "trainers"),
    (
        "machine",
        "pool",
        "warm_check",
        "choosing",
        "picking",
        "attempts",
        "single",
        "resuming",
        "run",
        "tracing",
        "changes",
        "starting",
    ),
    ("watch", "watch_trace", "environment"),
    ("console", "reporting", "again", "app", "cli", "__main__"),
)
NO_EFFECTS = {"os", "time", "random", "pathlib", "subprocess", "socket", "tempfile", "threading", "secrets", "shutil"}


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Path below the package, with slashes."""
    return path.relative_to(PACKAGE).as_posix()


def floor_of(name: str) -> int | None:
    """The floor of a module or package; None for the package itself and for the probe."""
    head = name.split("/")[0].removesuffix(".py")
    return next((index for index, floor in enumerate(FLOORS) if head in floor), None)


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Absolute names of imported modules; with `top_only`, not those inside functions or TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(tree.body) if top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_import_only_from_their_floor_or_below(path: Path) -> None:
    """An arrow never points up."""
    floor = floor_of(name_of(path))
    if floor is None:
        return
    for name in imports(path):
        if name.startswith("nanbisect."):
            other = floor_of(name.removeprefix("nanbisect.").replace(".", "/"))
            assert other is None or other <= floor, f"{name_of(path)} imports {name} from a floor above"


def test_every_module_has_a_floor() -> None:
    """A new module must be placed."""
    homeless = [name_of(path) for path in modules() if floor_of(name_of(path)) is None]
    assert [name for name in homeless if not name.startswith("probe/")] == ["__init__.py"]


@pytest.mark.parametrize("path", [p for p in modules() if floor_of(name_of(p)) == 1 or name_of(p) in PURE], ids=name_of)
def test_thinking_has_no_effects(path: Path) -> None:
    """No clock, file, environment or randomness: those are passed in."""
    names = imports(path) - {"pathlib.PurePath"}
    used = {name.split(".")[0] for name in names} & NO_EFFECTS
    if "pathlib.PurePath" in imports(path):  # paths as text are no effect
        used -= {"pathlib"} if "pathlib.Path" not in names else set()
    assert not used, f"{name_of(path)} imports {used}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_heavy_libraries_stay_in_the_training_process(path: Path) -> None:
    """torch and its kin are imported by trainers/sft and the probe alone; pandas where it is used."""
    name = name_of(path)
    if not name.startswith(TRAINING):
        assert not {found.split(".")[0] for found in imports(path)} & {"torch", "transformers", "accelerate"}
        heavy = HEAVY - {"numpy"} if name.startswith(COUNTING) and name not in DOOR else HEAVY
        assert not {found.split(".")[0] for found in imports(path, top_only=True)} & heavy


def test_the_search_is_entered_by_its_door() -> None:
    """Nobody imports at the top what imports numpy, but for the modules behind the door."""
    for path in modules():
        name = name_of(path)
        if name in DOOR or not name.startswith(COUNTING):
            inside = {f"{found.replace('.', '/')}.py" for found in imports(path, top_only=True)}
            behind = {found.removeprefix("nanbisect/") for found in inside if found.startswith("nanbisect/search/")}
            assert not {found for found in behind if (PACKAGE / found).is_file()} - {*DOOR}, name


@pytest.mark.parametrize("path", [p for p in modules() if name_of(p).startswith(("probe/", LOOK))], ids=name_of)
def test_the_probe_is_one_folder_of_stdlib_and_torch(path: Path) -> None:
    """It imports nothing of ours and nothing that the user's environment may lack. So does the doctor's look."""
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= {"torch", *sys.stdlib_module_names, "__future__"}


def test_nothing_imports_the_probe() -> None:
    """It is started by path."""
    for path in modules():
        if not name_of(path).startswith("probe/"):
            started = ("nanbisect.probe", "nanbisect.environment.look")
            assert not any(name.startswith(started) for name in imports(path)), name_of(path)


SNIPPET = """
import sys
from nanbisect.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
print("HEAVY", sorted(set(sys.modules) & {heavy}), file=sys.stderr)
"""


def test_help_imports_nothing_heavy() -> None:
    """`nanbisect --help` answers at once: no torch, transformers, accelerate, pandas, matplotlib."""
    code = SNIPPET.replace("{heavy}", repr(HEAVY | {"rich.live", "pydantic", "yaml", "psutil"}))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert "HEAVY []" in done.stderr


def test_only_the_store_and_the_writers_know_file_names() -> None:
    """The files of a run folder are spelled where they are written, and nowhere else."""
    owners = {"store.py", "executors/base.py", "trainers/sft/diary.py", "trainers/sft/launch.py", "probe/journal.py"}
    for path in modules():
        if name_of(path) in owners or name_of(path).startswith("report/"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
        ]
        for name in ("attempt.json", "outcome.json", "run.json", "trainer.jsonl", "exit.json", "events."):
            assert not any(text.startswith(name) for text in texts), f"{name_of(path)} spells {name}"
