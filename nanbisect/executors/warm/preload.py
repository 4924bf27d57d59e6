"""What a server imports: the modules it was told, and the libraries that a script imports at its top.

Only libraries of this list, never a module of the user's: a script's own code, and whatever its import
does, runs in the child. Python 3.9+, standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import sys
from typing import Any, Callable, Iterator, List, Sequence, Set, Tuple

LIBRARIES = frozenset(
    (
        *("torch", "numpy", "transformers", "accelerate", "datasets", "peft", "trl", "safetensors", "tokenizers"),
        *("huggingface_hub", "pandas", "pyarrow", "sentencepiece", "yaml", "tqdm", "einops"),
    )
)
LEARNED = LIBRARIES | {"sympy"}  # what these import late, on first use, a server learns from its children
LATE = ("torch._dynamo",)
"""What every optimizer of torch imports when it is made. It takes a second, which the first child need not wait for."""
NESTED = (ast.If, ast.Try, ast.With)


def wanted(modules: Sequence[str], scripts: Sequence[str]) -> Iterator[Tuple[str, List[str]]]:
    """(module, names taken from it) to import, in order: torch first, so that the probe sees the rest come."""
    yield "torch", []
    for module in modules:
        yield module, []
    for script in scripts:
        yield from _imports(script)


def bring(module: str, names: Sequence[str]) -> None:
    """Import as `from module import names` would. What can't be imported is the child's to complain about."""
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            getattr(found, name, None)
    except (Exception, SystemExit):  # noqa: BLE001 - any library, any error: the child meets it again, in its own log
        return


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports in here are not interrupted to look for garbage: they leave little, and it takes a fifth of their time.

    What a library itself sets for the collector stays.
    """
    before = gc.get_threshold()
    gc.set_threshold(0, *before[1:])
    try:
        yield
    finally:
        if gc.get_threshold() == (0, *before[1:]):
            gc.set_threshold(*before)


def files_of(module: str) -> List[str]:
    """The file that `python -m module` runs, found without importing anything of it; none if it is unclear."""
    tail = os.path.join(*module.split("."))
    for folder in [os.getcwd(), *sys.path]:
        for name in (os.path.join(folder, tail, "__main__.py"), os.path.join(folder, tail + ".py")):
            if os.path.isfile(name):
                return [name]
    return []


def root_of(module: str) -> str:
    """The library that a module belongs to."""
    return module.partition(".")[0]


def _imports(script: str) -> Iterator[Tuple[str, List[str]]]:
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _top(tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _known(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from _known(node.module, [alias.name for alias in node.names if alias.name != "*"])


def _known(module: str, names: List[str]) -> Iterator[Tuple[str, List[str]]]:
    if root_of(module) in LIBRARIES:
        yield module, names


def _top(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the script is imported, also those in `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, NESTED):
            yield from _top(node.body)
            yield from _top(getattr(node, "orelse", []))


def report(path: str, before: Set[str]) -> None:
    """At the end of a child: which modules of the known libraries it had to import itself."""
    names = [name for name in list(sys.modules) if name not in before and root_of(name) in LEARNED]
    try:
        with open(path + ".part", "w") as file:
            file.write("\n".join(names))
        os.replace(path + ".part", path)
    except OSError:  # a full disk: the next child imports them again
        return


def reported(folder: str) -> List[str]:
    """What children have reported since the last time."""
    names: List[str] = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("modules-") and not name.endswith(".part"):
            path = os.path.join(folder, name)
            with open(path) as file:
                names += file.read().split()
            os.remove(path)
    return names


def threads() -> List[str]:
    """Names of the other threads of this process, as a fork finds them."""
    forked(lambda: False)
    return others()


def forked(ask: Callable[[], Any]) -> bool:
    """What a fork of this process answers.

    OpenBLAS ends its threads by itself when the process forks, and starts them again when they are needed.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(bool(ask())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def others() -> List[str]:
    """Names of the other threads of this process now."""
    own = str(os.getpid())
    return [_name(task) for task in os.listdir("/proc/self/task") if task != own]


def _name(task: str) -> str:
    try:
        with open("/proc/self/task/%s/comm" % task) as file:
            return file.read().strip()
    except OSError:
        return "?"
