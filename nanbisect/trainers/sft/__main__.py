"""The training process: `python -m nanbisect.trainers.sft JOB.json [--check | --levels]`.

Whatever happens ends as one `end` line in the diary, so that the driver never has to guess. This is
the one broad `except` of the project that does not raise again.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput, Unsupported, out_of_memory

KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""How many kernels oneDNN keeps on a CPU, and torch's own list of them, unless the user says; 1,024 each by default.

A kernel is made for its shape. Records of ever new lengths need new ones at each step, 16 MB of them for a model
of the demo's size, and a process that lives for one cell never comes back to the old ones. A step of it uses 30.
Both are read at the first product of matrices, hence also where torch was imported before. Which kernel computes
what doesn't depend on them. A process that stays for further cells comes back to all.
"""


def main(arguments: list[str], kept: Any = None) -> int:
    """Train or check; 0 whenever the end line says what happened. `kept`: what cells before have left to this one."""
    job = Job.read(Path(arguments[0]))
    diary = Diary(Path(job.folder))
    try:
        if "--check" in arguments:
            from nanbisect.trainers.sft.check import check as work
        elif "--levels" in arguments:
            from nanbisect.trainers.sft.check import levels as work
        elif kept is not None:
            work = kept.train
        else:
            from nanbisect.trainers.sft.loop import train as work
        diary.write("end", how=work(job, diary))
    except BadInput as error:
        diary.write("end", how="bad_input", text=str(error))
    except Unsupported as error:
        diary.write("end", how="unsupported", text=str(error), levels=error.levels)
    except Exception as error:  # noqa: BLE001 - any exception must become an outcome
        traceback.print_exc()
        how = "out_of_memory" if out_of_memory(error) else "error"
        diary.write("end", how=how, text=f"{type(error).__name__}: {error}")
        return 1
    finally:
        diary.close()
    return 0


def stays() -> Any:
    """Where further cells come from, in a process that was forked to train several; None in all others."""
    forked = sys.modules.get("_nanbisect_child")
    return forked.orders if forked is not None else None


def leave(code: int) -> NoReturn:
    """End at once. Taking the interpreter apart takes longer than many a cell's training, and nothing waits for it:
    every line is written, no thread is left, and what asked to be called at the exit is called, but for torch, which
    would take its tables of operators apart, one by one.
    """
    for finalizer, info in list(getattr(weakref.finalize, "_registry", {}).items()):
        if getattr(info.func, "__module__", None) == "torch.library":
            finalizer.atexit = False
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if stays() is None:
        for variable, capacity in KERNELS.items():
            os.environ.setdefault(variable, capacity)
        leave(main(sys.argv[1:]))
    from nanbisect.trainers.sft.kept import serve

    leave(serve(stays(), main))
