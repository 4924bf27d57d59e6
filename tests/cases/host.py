"""A process that has imported torch, and forks a child for each training it is told to run.

    python host.py [underflow]     (one job a line on standard input, one answer a line on standard output)

A child runs one unmodified script as `__main__`, with the probe writing to the job's folder where this process
has one, or with one of the two aids switched on. What it prints goes to files in that folder.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

LIMIT = 60  # seconds that a training may take
ANOMALY, UNDERFLOW = "detect_anomaly", "DebugUnderflowOverflow"


def watch_underflow(names: dict[str, Any]) -> None:
    """Hand the script's model to DebugUnderflowOverflow at the first call of any module, as its user would."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers.debug_utils import DebugUnderflowOverflow

    def attach(module: torch.nn.Module, inputs: Any) -> None:
        handle.remove()
        DebugUnderflowOverflow(names["model"])

    handle = register_module_forward_pre_hook(attach)


def train(job: dict[str, Any]) -> None:
    """Run the script of a job in this process, with what the job switches on."""
    script = Path(job["script"])
    sys.argv = [str(script), *job["arguments"]]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    if job["aid"] == ANOMALY:
        torch.autograd.set_detect_anomaly(True)
    elif job["aid"] == UNDERFLOW:
        watch_underflow(names)
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)


def child(job: dict[str, Any]) -> None:
    """One training from its first line to the last word of the probe; never returns."""
    folder, status = Path(job["folder"]), 0
    signal.alarm(LIMIT)
    for number, name in ((0, os.devnull), (1, folder / "out.txt"), (2, folder / "err.txt")):
        os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o644), number)
    os.environ.update(job["env"])
    if "_nanbisect_probe" in sys.modules:
        sys.modules["_nanbisect_probe"].moved(str(folder))
    try:
        train(job)
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001
        sys.last_value = error
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Answer jobs until standard input ends."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first one imports dynamo: not in every child
    if sys.argv[1:] == ["underflow"]:
        import transformers.debug_utils  # noqa: F401 - once, not in every child
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    os._exit(0)  # taking torch apart would need a second


if __name__ == "__main__":
    main()
