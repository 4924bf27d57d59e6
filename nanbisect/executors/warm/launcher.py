"""What `accelerate launch` would start: asked of the installed launcher itself, in a fork.

In a fork, because the launcher looks at devices, and a process that has touched CUDA can't be forked.
Python 3.9+, standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence

OTHERS = ("multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")


class Started(NamedTuple):
    """A process of Python: its words (without the interpreter) and its whole environment."""

    words: List[str]
    env: Dict[str, str]


class _Simple(Exception):
    """The launcher came to the point where it starts one process with these arguments."""


class _Other(Exception):
    """The launcher would start something else."""


def ask(argv: Sequence[str]) -> Optional[Started]:
    """What `accelerate launch *argv` starts in this environment; None if that is not one process of Python."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _answer(argv, write)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    found = json.loads(data) if data else None
    return Started(found["words"], found["env"]) if found else None


def _answer(argv: Sequence[str], write: int) -> NoReturn:
    """In the fork: write the answer, or nothing, and end."""
    try:
        found = _launched(argv)
        if found is not None:
            with os.fdopen(write, "wb") as file:
                file.write(json.dumps(found._asdict()).encode())
    except BaseException:  # noqa: BLE001 - whatever the launcher does: a cold start will show it
        os._exit(1)
    os._exit(0)


def _launched(argv: Sequence[str]) -> Optional[Started]:
    from accelerate.commands import launch

    def simple(args: Any) -> NoReturn:
        raise _Simple(args)

    def other(*_: Any) -> NoReturn:
        raise _Other

    module: Any = launch
    module.simple_launcher = simple
    for name in OTHERS:
        setattr(module, name, other)
    try:
        module.launch_command(module.launch_command_parser().parse_args(list(argv)))
    except _Simple as error:
        words, env = module.prepare_simple_launcher_cmd_env(error.args[0])
        return Started(words[1:], env) if words[:1] == [sys.executable] else None
    return None
