"""Facts -> rows: each says ok, warn or missing, what that means for the levels of a matrix, and the mend. Pure.

A row speaks of what was tried. `missing` is for what is not there or does not work, `warn` for what works in
part; neither keeps other cells from running, unless the row is essential.
"""

from __future__ import annotations

from nanbisect.environment import attention_rows, machine_rows, torch_rows
from nanbisect.environment.row import Facts, Row


def rows_of(facts: Facts, *, own: bool = True, device: str = "auto") -> tuple[Row, ...]:
    """All rows, the essential ones first.

    `own`: the Python looked at is the one that nanbisect runs in. `device` is what the matrix asks for.
    """
    return (
        torch_rows.python_row(facts),
        torch_rows.torch_row(facts),
        torch_rows.device_row(facts, device),
        *torch_rows.gpu_rows(facts),
        *torch_rows.driver_row(facts),
        *attention_rows.kernel_rows(facts),
        *attention_rows.flash_rows(facts),
        *(machine_rows.package_row(name, facts, own=own) for name in ("transformers", "accelerate")),
        *machine_rows.others_row(facts),
        machine_rows.slurm_row(facts),
        *machine_rows.disk_rows(facts),
        machine_rows.memory_row(facts),
        machine_rows.cores_row(facts),
    )
