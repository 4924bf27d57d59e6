"""Where an operation runs: phase, module, line of the user's code, autograd node, and that node's forward.

A node takes its number before its operation is dispatched: so the operation under which the counter moved
made the node before it, and in backward the node at work leads to the line of its forward. The counter is
one a thread, and on a device backward runs on a thread of its own: there are as many tables. The outermost
backward looks in the table of the thread that ran the forward, a nested one (reentrant checkpointing) in
that of the thread that called it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep
STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)
ENGINES = {  # frames under which autograd's engine works: what is below them is not the operation's line
    os.path.join(TORCH, "autograd", "graph.py"): ("_engine_run_backward",),
    os.path.join(TORCH, "autograd", "__init__.py"): ("backward", "grad"),
}
USER, SKIP, ENGINE = 0, 1, 2
ACCUMULATE = (1 << 64) - 1  # the number of every AccumulateGrad

C: Any = torch._C

Line = Tuple[str, int, str]  # file, line, function


class Made(NamedTuple):
    """The operation that made a node."""

    line: Optional[Line]
    module: Optional[int]
    operation: str
    nth: int  # number of the operation


class Place(NamedTuple):
    """`phase` bare: outside any module with parameters, to be resolved when the step is over.

    `module`: a module's id. `made`: where the node at work comes from. `outer`: number of the outermost
    backward's node, where that is another one. `leaf`: id of the tensor whose gradient is added up.
    """

    phase: str
    module: Optional[int]
    line: Optional[Line]
    node: Optional[str] = None
    number: Optional[int] = None
    made: Optional[Made] = None
    outer: Optional[int] = None
    leaf: Optional[int] = None

    @property
    def source(self) -> Optional[Line]:
        """The user's line: its own, or of the forward."""
        return self.line if self.line is not None or self.made is None else self.made.line

    @property
    def owner(self) -> Optional[int]:
        """The module at work, or that of the forward."""
        return self.module if self.module is not None or self.made is None else self.made.module


class Call(NamedTuple):
    """A backward call: where its nodes were made, whether it makes a graph itself, the outermost call's node at
    work, and the user's line that called."""

    table: Dict[int, Made]
    twice: bool = False
    outer: Optional[int] = None
    line: Optional[Line] = None


class Here(threading.local):
    """One thread's own: modules at work, those of them that are not in backward, the last node's number."""

    def __init__(self) -> None:
        self.stack: List[Tuple[int, bool]] = []
        self.base = 0
        self.last = -1
        self.table: Dict[int, Made] = {}


class Places:
    """Answers for the operation under way."""

    def __init__(self) -> None:
        self.here = Here()
        self.kinds: Dict[str, int] = {}
        self.count = 0  # operations so far
        self.moments: List[Tuple[int, str]] = []  # (operations before it, what started: forward, backward, after)
        self.doing: Optional[str] = None  # clip or optimizer
        self.modules: Dict[int, Any] = {}  # held for the one step: their paths are asked when it is over
        self.forward_table: Dict[int, Made] = self.here.table
        self.callers: List[Call] = []  # the backward calls at work
        self.tasks: Dict[int, Call] = {}

    def begin(self) -> None:
        """From now on: nodes made before are not this step's."""
        self.here.last = int(C._autograd._get_sequence_nr())
        self.forward_table = self.here.table

    def find(self, operation: str) -> Place:
        """Where the operation under way runs. Called two frames below the dispatch."""
        here = self.here
        self.count += 1
        line = self.line(sys._getframe(2))
        module = here.stack[-1][0] if here.stack else None
        number = C._autograd._get_sequence_nr()
        if number != here.last and number > 0:
            here.last = number
            here.table[number - 1] = Made(line, module, operation, self.count)
        task = C._current_graph_task_id()
        if task == -1:
            if self.doing is not None and not torch.is_grad_enabled():  # a closure of the optimizer is forward
                return Place(self.doing, module, line)
            return Place("forward" if here.stack and here.stack[0][1] else "bare", module, line)
        return self._in_backward(task, line)

    def _in_backward(self, task: int, line: Optional[Line]) -> Place:
        here = self.here
        call = self._task(task)
        outer = call.outer
        node = C._current_autograd_node()
        inside = len(here.stack) > here.base
        again = inside or (line is not None and torch.is_grad_enabled() and not call.twice)
        module = here.stack[-1][0] if inside else None
        phase = "recompute" if again else "backward"
        if node is None:
            return Place(phase, module, line, outer=outer)
        number, name = node._sequence_nr(), node.name()
        if number == ACCUMULATE and not again:
            leaf = id(node.variable) if hasattr(node, "variable") else None
            return Place(phase, module, line, name, number, Made(call.line, None, name, 0), outer, leaf)
        return Place(phase, module, line, name, number, call.table.get(number), outer)

    def _task(self, task: int) -> Call:
        known = self.tasks.get(task)
        if known is None:
            known = self.callers[-1] if self.callers else Call(self.forward_table)
            self.tasks[task] = known
        return known

    def enter_backward(self, *, nested: bool, create_graph: bool) -> None:
        """A backward call starts on this thread."""
        outer = None
        if nested:
            node = C._current_autograd_node()
            outer = self.callers[-1].outer if self.callers else None
            outer = node._sequence_nr() if outer is None and node is not None else outer
        else:
            self.here.base = len(self.here.stack)
            self.moments.append((self.count, "backward"))
        line = self.line(sys._getframe(1))
        self.callers.append(Call(self.here.table if nested else self.forward_table, create_graph, outer, line))

    def leave_backward(self, *, nested: bool) -> None:
        """It is over."""
        if self.callers:
            self.callers.pop()
        if not nested:
            self.here.base = 0
            self.moments.append((self.count, "after"))

    def phase(self, place: Place, count: int) -> str:
        """The phase of an operation by what came before it and after, where it ran outside all modules."""
        if place.phase != "bare":
            return place.phase
        before = next((what for at, what in reversed(self.moments) if at < count), None)
        after = next((what for at, what in self.moments if at >= count), None)
        if before == "forward":
            return "forward" if after == "forward" else "loss"
        if before == "after":
            return "data" if after == "forward" else "clip"
        return "loss" if after == "backward" else "data"

    # lines -------------------------------------------------------------------------------------

    def line(self, frame: Any) -> Optional[Line]:
        """The innermost line of the user's; None where autograd's engine comes first."""
        kinds = self.kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = kinds[code.co_filename] = kind_of(code.co_filename)
            if kind == USER:
                return code.co_filename, frame.f_lineno, code.co_name
            if kind == ENGINE and code.co_name in ENGINES.get(code.co_filename, ()):
                return None
            frame = frame.f_back
        return None

    def lines(self, frame: Any, most: int) -> List[Line]:
        """The user's lines from the innermost out, at most so many."""
        found: List[Line] = []
        while frame is not None and len(found) < most:
            line = self.line(frame)
            if line is None:
                break
            while (frame.f_code.co_filename, frame.f_lineno) != line[:2]:
                frame = frame.f_back
            found.append(line)
            frame = frame.f_back
        return found

    # modules -----------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        """A module's forward starts."""
        stack = self.here.stack
        self.modules[id(module)] = module
        owns = stack[0][1] if stack else next(module.parameters(), None) is not None
        if not stack and owns and C._current_graph_task_id() == -1:
            self.moments.append((self.count, "forward"))
        stack.append((id(module), owns))

    def leave(self, module: torch.nn.Module, *_: Any) -> None:
        """It is over, or has raised: with it all that was inside."""
        stack = self.here.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place][0] == id(module):
                del stack[place:]
                return


def kind_of(file: str) -> int:
    """Whose code a file is."""
    if file in ENGINES:
        return ENGINE
    if file.startswith((TORCH, PROBE, "<frozen")):
        return SKIP
    standard = file.startswith(STANDARD) and not any(part in file for part in PACKAGES)
    return SKIP if standard else USER


def shown(line: Optional[Line]) -> Optional[str]:
    """file:line, below the working folder or the environment's packages where it is there."""
    if line is None:
        return None
    path = line[0]
    for part in PACKAGES:
        if part in path:
            return "%s:%d" % (path.rsplit(part, 1)[1], line[1])
    here = os.getcwd() + os.sep
    return "%s:%d" % (path[len(here) :] if path.startswith(here) else path, line[1])
