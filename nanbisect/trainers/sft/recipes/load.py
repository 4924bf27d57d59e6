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
from typing import Any, Protocol

from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput, Unsupported
from nanbisect.trainers.sft.view import Settings

FUNCTIONS = ("model", "records", "collate", "losses")
Record = Mapping[str, Any]


class Recipe(Protocol):
    """A module with four functions."""

    model: Callable[[Settings], Any]
    records: Callable[[Settings], Iterable[Record]]
    collate: Callable[[list[Record], Settings], Any]
    losses: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]


def load(name: str) -> Recipe:
    """A built-in recipe by name, or a Python file by absolute path. Raises BadInput."""
    if not name.endswith(".py"):
        return importlib.import_module(f"{__package__}.{name.replace('-', '_')}")  # type: ignore[return-value]
    module = _from_file(Path(name))
    missing = [function for function in FUNCTIONS if not callable(getattr(module, function, None))]
    if missing:
        raise BadInput(
            f"the recipe {Path(name).name} has no function {', '.join(missing)}\n"
            f"try: a recipe has four: model(settings), records(settings), collate(records, settings), losses(model, batch)"
        )
    return module  # type: ignore[return-value]


def _from_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"the recipe {path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with user_code(path.name, "import"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def user_code(recipe: str, what: str) -> Iterator[None]:
    """Errors inside become BadInput with the recipe's own line; memory errors and our own pass."""
    try:
        yield
    except (BadInput, Unsupported, MemoryError):
        raise
    except NotImplementedError as error:
        raise Unsupported(str(error) or f"{recipe} does not implement this combination") from error
    except Exception as error:
        if _out_of_memory(error):
            raise
        raise BadInput(f"the recipe {recipe} failed in {what}: {_describe(error, recipe)}") from error


def _out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") or "allocate memory" in str(error)


def _describe(error: BaseException, recipe: str) -> str:
    """`ValueError: no such column (my_recipe.py:41, in records)`: the last frame in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(recipe).name] or frames
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def chosen_records(recipe: Recipe, settings: Settings, job: Job) -> list[Record]:
    """The records every cell sees, in order: `skip_records`, then `records`, then over again up to `size`.

    Raises BadInput for records without an id, ids that are not there, and no records at all.
    """
    found = _take(recipe, settings, job)
    if not found:
        where = f" in {Path(job.data).name}" if job.data else ""
        raise BadInput(f"no records{where} (after skipping {job.skip_records})\ntry: a data file with at least one record")
    return list(itertools.islice(itertools.cycle(found), job.size))


def _take(recipe: Recipe, settings: Settings, job: Job) -> list[Record]:
    name = Path(job.recipe).name
    wanted = set(job.records)
    kept: list[Record] = []
    with user_code(name, "records"):
        for number, record in enumerate(recipe.records(settings)):
            identifier = _id(record, number, name)
            if number < job.skip_records or (wanted and identifier not in wanted):
                continue
            kept.append({**record, "id": identifier})
            if len(kept) == (len(wanted) or job.size):
                break
    missing = wanted - {record["id"] for record in kept}
    if missing:
        raise BadInput(f"no record with the id {', '.join(sorted(missing))}\ntry: ids as the data has them, or line numbers for records without one")
    return kept


def _id(record: Any, number: int, recipe: str) -> str:
    if not isinstance(record, Mapping) or "id" not in record:
        raise BadInput(f"record {number + 1} of {recipe} is no mapping with an `id`")
    return str(record["id"])
