"""From a recipe's name or path to its four functions, and its errors in the user's words."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput, Unsupported, first_line, out_of_memory
from nanbisect.trainers.sft.settings import RECIPES
from nanbisect.trainers.sft.view import Settings

FUNCTIONS = ("model", "records", "collate", "losses")
NO_KERNEL = (
    "No available kernel",
    "No viable backend for scaled_dot_product",
    "FlashAttention only support",
    "FlashAttention forward only supports",
)
Record = Mapping[str, Any]


class Recipe(Protocol):
    """A module with four functions."""

    model: Callable[[Settings], Any]
    records: Callable[[Settings], Iterable[Record]]
    collate: Callable[[list[Record], Settings], Any]
    losses: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]


def load(name: str) -> Recipe:
    """A built-in recipe by name, or a Python file by absolute path. Raises BadInput."""
    if name in RECIPES:
        return cast(Recipe, importlib.import_module(f"{__package__}.{name.replace('-', '_')}"))
    if not name.endswith(".py"):
        known = ", ".join(RECIPES)
        raise BadInput(
            f"the recipe {name!r} is no Python file\ntry: the path of a .py file, or a built-in one: {known}"
        )
    module = _from_file(Path(name))
    missing = [function for function in FUNCTIONS if not callable(getattr(module, function, None))]
    if missing:
        raise BadInput(
            f"the recipe {Path(name).name} has no function {', '.join(missing)}\n"
            "try: a recipe has four: "
            "model(settings), records(settings), collate(records, settings), losses(model, batch)"
        )
    return cast(Recipe, module)


def _from_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"_recipe_{path.stem}"  # never in the place of a library
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"the recipe {path} can't be imported\ntry: a readable Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(path.name, "import"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def user_code(recipe: str, what: str) -> Iterator[None]:
    """Errors inside become BadInput with the recipe's own line; memory errors and our own pass.

    The traceback of a user's recipe goes to the log. A kernel that refuses what it was given makes the
    cell unsupported, and so does NotImplementedError, by which a recipe may refuse a combination.
    """
    try:
        yield
    except (BadInput, Unsupported):
        raise
    except NotImplementedError as error:
        raise Unsupported(str(error) or f"{recipe} does not implement this combination") from error
    except (Exception, SystemExit) as error:
        if out_of_memory(error) or type(error).__name__ == "AcceleratorError":
            raise
        if any(words in str(error) for words in NO_KERNEL):
            raise Unsupported(f"no attention kernel takes this: {first_line(error)}") from error
        if recipe.endswith(".py"):
            traceback.print_exc()
        raise BadInput(f"the recipe {recipe} failed in {what}: {_describe(error, recipe)}") from error


def _describe(error: BaseException, recipe: str) -> str:
    """`ValueError: no such column (my_recipe.py:41, in records)`: the last frame in the user's file."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return said  # names file and line itself
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(recipe).name] or frames
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    return said + where


def chosen_records(recipe: Recipe, settings: Settings, job: Job) -> list[Record]:
    """The records every cell sees, in order: `skip_records`, then `records`, then over again up to `size`.

    Raises BadInput for records without an id, ids that are not there, and no records at all.
    """
    found = _take(recipe, settings, job)
    if not found:
        where = f" in {Path(job.data).name}" if job.data else ""
        skipped = f" after the {job.skip_records} that are skipped" if job.skip_records else ""
        raise BadInput(f"no records{where}{skipped}\ntry: data with at least one record more")
    return list(itertools.islice(itertools.cycle(found), job.size))


def _take(recipe: Recipe, settings: Settings, job: Job) -> list[Record]:
    """Records up to the last one needed; several may share an id."""
    name = Path(job.recipe).name
    missing = set(job.records)
    kept: list[Record] = []
    with user_code(name, "records"):
        for number, record in enumerate(recipe.records(settings)):
            identifier = _id(record, number, name)
            if number < job.skip_records or (job.records and identifier not in job.records):
                continue
            kept.append({**record, "id": identifier})
            missing.discard(identifier)
            if not missing and (job.records or len(kept) == job.size):
                break
    if missing:
        skipped = f" after the {job.skip_records} that are skipped" if job.skip_records else ""
        raise BadInput(
            f"no record with the id {', '.join(sorted(missing))}{skipped}\n"
            "try: ids as the data has them, or line numbers for records without one"
        )
    return kept


def _id(record: Any, number: int, recipe: str) -> str:
    if not isinstance(record, Mapping) or "id" not in record:
        found = "has no `id`" if isinstance(record, Mapping) else f"is {type(record).__name__}, not a mapping"
        raise BadInput(f"record {number + 1} of {recipe} {found}\ntry: records() that yields {{'id': ..., ...}}")
    return str(record["id"])
