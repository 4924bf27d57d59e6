"""Ports for launchers: one that is free now and that no other launch of this process was given.

A port is only looked at here; the launcher that is told of it binds it some seconds later. So it comes
from below the ports that systems hand out by themselves (from 32768 on Linux, 49152 elsewhere): there no
gloo or NCCL connection of another cell can take it meanwhile. Two nanbisect on one machine begin at
different places. Who finds the port taken all the same says so, and the driver makes the attempt again.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
from collections.abc import Sequence
from pathlib import PurePath

from nanbisect.errors import ExecutorError

FIRST, LAST = 20000, 29400  # 29400 and 29500 are what launchers take by themselves
_turn = itertools.count(random.randrange(LAST - FIRST))


def free_port() -> int:
    """The next port that nobody has; all others have their turn first. Raises ExecutorError when all are in use."""
    for _ in range(LAST - FIRST):
        port = FIRST + next(_turn) % (LAST - FIRST)
        if _is_free(port):
            return port
    raise ExecutorError(
        f"no free port between {FIRST} and {LAST}\ntry: ss -ltn, which shows who listens; end what is not needed"
    )


def port_environment(argv: Sequence[str], port: int) -> dict[str, str]:
    """The variables by which launchers without a flag for it learn the port.

    MASTER_PORT is read by LLaMA-Factory, ms-swift and scripts that spawn their own ranks. torchrun ignores it
    and reads PET_MASTER_PORT, which is left out where no torchrun can be below.
    """
    program = PurePath(argv[0]).name if argv else ""
    elastic = any(word.startswith("torch.distributed") for word in argv)
    plain = program == "accelerate" or (program.startswith("python") and not elastic)
    return {"MASTER_PORT": str(port), **({} if plain else {"PET_MASTER_PORT": str(port)})}


def _is_free(port: int) -> bool:
    """Whether nobody listens there, on any address of IPv4 or IPv6."""
    return _can_bind(socket.AF_INET, "", port) and _can_bind(socket.AF_INET6, "::", port)


def _can_bind(family: socket.AddressFamily, address: str, port: int) -> bool:
    """False only for a port in use; a machine without this family of addresses has nobody on it."""
    try:
        with socket.socket(family) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as launchers do: a closed one may linger
            probe.bind((address, port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
