"""Put on PYTHONPATH by nanbisect: chains to any other `sitecustomize`, then waits for torch.

The probe is installed right after torch was executed, in every Python process of the tree. The finder
stays until then: libraries ask `find_spec("torch")` before they import it, and a finder that removed
itself at the question would never install. A broken probe must not break the run, so its errors are
printed and swallowed here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from types import ModuleType
from typing import Any, Sequence

HERE = os.path.dirname(os.path.realpath(__file__))
PRIVATE = "_nanbisect_probe"


def chain() -> None:
    """Run the `sitecustomize` that would have run without us, under its own name."""
    rest = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    ours = sys.modules.get("sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except Exception:  # noqa: BLE001 - what `site` does: print and go on
        traceback.print_exc()
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def load_probe() -> None:
    """Load the probe's folder as a private package, so that no name of the user's is shadowed."""
    folder = os.path.dirname(HERE)
    spec = importlib.util.spec_from_file_location(
        PRIVATE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError("no loader for " + folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[PRIVATE] = module
    spec.loader.exec_module(module)
    module.install(os.environ["NANBISECT_PROBE"])


def try_load_probe() -> None:
    """Load the probe; print what went wrong instead of breaking the user's import of torch.

    Nobody listens any more where the folder is gone: a process in the background outlived its watcher.
    """
    if not os.path.isdir(os.environ["NANBISECT_PROBE"]):
        return
    try:
        load_probe()
    except Exception:  # noqa: BLE001
        sys.modules.pop(PRIVATE, None)
        sys.stderr.write("nanbisect: the probe could not be installed\n")
        traceback.print_exc()


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else does, and installs the probe when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The real spec of torch, with our step after `exec_module`; None for any other name."""
        if name != "torch":
            return None
        spec = self._real_spec(name, path, target)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # kept until now: an import of torch that failed may be tried again
                sys.meta_path.remove(self)
                try_load_probe()

        try:
            loader.exec_module = exec_module
        except AttributeError:
            sys.stderr.write("nanbisect: torch's loader can't be wrapped; the probe is absent\n")
        return spec

    def _real_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def mark(folder: str) -> None:
    """Leave an empty file that says: PYTHONPATH reached a Python process, whatever it imports."""
    try:
        os.close(os.open(os.path.join(folder, "reached"), os.O_WRONLY | os.O_CREAT, 0o644))
    except OSError:  # the folder is gone or full: what comes next will say so
        return


def arm() -> None:
    """Install now if torch is there already (a .pth file may import it), else when it comes."""
    folder = os.environ.get("NANBISECT_PROBE")
    if not folder:
        return
    mark(folder)
    if "torch" in sys.modules:
        try_load_probe()
    else:
        sys.meta_path.insert(0, TorchFinder())


chain()
arm()
