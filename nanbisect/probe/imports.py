"""Does something right after a module was imported, whenever that is. For libraries that come after torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Callable, Sequence


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as everybody else does; `actions`: name -> what to do once it has been executed."""

    def __init__(self, actions: dict[str, Callable[[Any], Any]]) -> None:
        self.actions = actions

    def arm(self) -> None:
        """Act on what is there already; wait for the rest."""
        for name in [name for name in self.actions if name in sys.modules]:
            self.actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The real spec, with our step after `exec_module`; None for any other name."""
        if name not in self.actions:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action = self.actions.pop(name, None)
            if action is not None:
                action(module)

        loader.exec_module = exec_module
        return spec
