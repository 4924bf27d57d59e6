"""Which commands may start warm: one process of Python that runs a script, a module, or `accelerate launch`.

Only what the words say is judged here. Whether `accelerate launch` would start one process or several is
asked of the launcher itself, in the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nanbisect.executors.base import WarmStart
from nanbisect.trainers.interpreter import PYTHON, find_program, find_python

UNBUFFERED = "-u"  # every attempt has PYTHONUNBUFFERED
LAUNCHER = "accelerate.commands.launch"
LAUNCHERS = frozenset((LAUNCHER, "accelerate", "torch.distributed.run", "torch.distributed.launch", "deepspeed"))


def warm_start(argv: Sequence[str], *, workdir: Path, env: Mapping[str, str]) -> WarmStart | None:
    """How this command may start warm; None where it must start as it is."""
    first, rest = argv[0], list(argv[1:])
    if Path(first).name == "accelerate" and rest[:1] == ["launch"]:
        python = find_python(argv[:1], workdir=workdir, env=env)
        return WarmStart(str(python), "accelerate", tuple(rest[1:])) if python else None
    if not PYTHON.fullmatch(Path(first).name) or find_program(first, workdir=workdir, env=env) is None:
        return None
    while rest[:1] == [UNBUFFERED]:
        rest = rest[1:]
    return _of_python(first, rest)


def _of_python(python: str, words: Sequence[str]) -> WarmStart | None:
    if len(words) >= 2 and words[0] == "-m":
        if words[1] == LAUNCHER:
            return WarmStart(python, "accelerate", tuple(words[2:]))
        return None if words[1] in LAUNCHERS else WarmStart(python, "module", tuple(words[1:]))
    script = bool(words) and words[0].endswith(".py")  # no option, no zip, no folder
    return WarmStart(python, "script", tuple(words)) if script else None
