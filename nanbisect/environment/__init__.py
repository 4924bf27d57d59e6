"""`nanbisect doctor`: what this machine can run, and the mend for each thing that is missing.

    look.py      runs in the Python that trains (started by path): tries torch, GPUs, attention kernels
    machine.py   what needs no torch: driver, Slurm, disk, memory, cores
    facts.py     starts the one, asks the other: facts, as JSON values
    row.py       a row, and words that several rows need                                      (pure)
    rows.py      facts -> rows, each ok, warn or missing, with what it means and the mend     (pure)
                 (torch_rows.py, attention_rows.py, machine_rows.py: one function a row)
    levels.py    what a matrix's trainer tried -> whether each level can run here             (pure)
    checkup.py   all of it for one call: the document that `doctor --json` prints, and the exit code

The document, whose `schema` changes when a key changes its meaning or goes:

    {"schema": 1, "usable": true, "device": "cuda", "cpu" or null, "python": "the interpreter that was looked at",
     "rows": [{"name": "torch", "state": "ok" | "warn" | "missing", "essential": true, "found": "...",
               "means": "..." or "", "mend": "..." or "", "levels": ["attention=flash", ...]}],
     "matrix": null or {"name": "...", "trainer": "...", "cells": 36, "runnable": 24 or null, "reason": "",
                        "levels": [{"setting": "...", "level": "...", "factor": true, "runs": true | false | null,
                                    "why": "..."}]},
     "facts": {"python": {...}, "torch": {...}, "cpu": {...}, "gpus": {...}, "kernels": [...], "flash": [...],
               "imports": {...}, "machine": {...}}}

Names of rows: python, torch, device, gpu (or gpu.0, gpu.1, ...), driver, sdpa.math, sdpa.flash, sdpa.efficient,
sdpa.cudnn (with `.N` where GPUs of several kinds were tried), flash-attn, flash-attn-3, transformers, accelerate,
others, slurm, disk.runs, disk.tmp, memory, cores. A row is left out where there is nothing to say. Its `levels` are
those of a matrix that it decides.

`device` is where cells train (where the matrix says, if it does); null when nothing computes there. Of a level,
`runs` is null where nothing was tried: only the training itself shows it. `runnable` is null when the levels could
not be tried, with the `reason`. The keys below `facts` are those of `look.py` and `machine.py`.
"""
