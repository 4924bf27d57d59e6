"""The one definition of the probe's events: kind -> field -> meaning.

The driver reads this table as data (it never imports the probe) and checks every line against it.
Numbers that JSON lacks are written as "nan", "+inf", "-inf". Steps count from 1, micro-batches and
ranks from 0. Every line also has `time`, seconds since the epoch, and `n`, its number in the file from 0: a
gap means that a line was lost (a full disk).
"""

from typing import Dict

SCHEMA = 1

EVENTS: Dict[str, Dict[str, str]] = {
    "awake": {
        "schema": "version of this table",
        "rank": "rank of the process",
        "pid": "process id",
        "argv": "command line",
        "torch": "torch's version",
        "python": "Python's version",
    },
    "self_check": {
        "seen": "whether a planted NaN was seen through the same hooks as the real gradients",
        "device": "where it was planted",
        "rank": "rank of the process at its first backward: process groups are formed by then",
        "world": "number of processes in its group; 1 without one",
    },
    "root": {
        "module": "class of a module that training calls",
        "parameters": "number of parameters",
        "elements": "number of elements in them",
        "dtypes": "dtype -> number of parameters",
        "device": "device of the first parameter",
        "dropout": "whether a dropout is active",
        "tied": "names of parameters known under several names",
    },
    "nonfinite": {
        "step": "optimizer step in which it surfaced",
        "since": "last step after which the same was looked at and finite, if steps between were not; else null",
        "micro_batch": "micro-batch of that step",
        "rank": "rank that saw it",
        "phase": "load, forward (a buffer), loss, backward, reduce (from another rank), clip or optimizer",
        "value": "nan, +inf or -inf",
        "tensors": "what showed it, first to arrive first: name, value, micro_batch, uses, nan, posinf, neginf, numel",
        "bad": "how many distinct tensors showed it",
        "of": "how many were looked at",
        "scale": "the GradScaler's scale, where there is one",
        "backward": "false for a loss that the script did not hand to backward",
    },
    "step": {
        "step": "number of the step",
        "taken": "whether the optimizer moved",
        "ended": "what ended it: step, scaler_skip, dropped, backward_only, exit",
        "losses": "one a micro-batch: micro_batch, handed (value handed to backward), unscaled",
        "backwards": "number of outermost backward calls",
        "nested": "number of backward calls inside backward (reentrant checkpointing)",
        "recomputed": "number of module forwards run during backward",
        "kernels": "attention and softmax nodes of the graph -> count",
        "casts": "changes of dtype in the graph; null where a node of somebody's own may hide some",
        "gradients": "number of gradients that arrived",
        "bad": "gradients that arrived non-finite, as in `nonfinite.tensors`, and of which micro-batch",
        "norm": "total norm handed to clipping",
        "clip": "what clipping did: call, max_norm, raised",
        "after_clip": "what a check after clipping would say: first, bad, numel, parameters_bad, parameters",
        "gradient_norms": "L2 norm of each gradient, at step 1 only",
        "scale": "the GradScaler's scale before the step",
        "memory": "peak bytes: host, device",
        "seconds": "since the end of the step before",
        "probe_seconds": "the probe's own share of it, by the host's clock",
    },
    "repair": {
        "step": "step in which it happened",
        "code": "gradients_set_to_none, gradients_repaired, scaler_skip, dropped_step, infinite_buffer, "
        "nan_buffer, zero_after_inf, loss_filtered, zero_loss_with_bad_norm, no_gradient, forward_without_backward, "
        "backward_raised",
        "text": "one sentence",
        "tensors": "names of what was repaired",
        "values": "numbers that show it, by name",
    },
    "batch": {
        "step": "optimizer step in which its gradients arrived",
        "micro_batch": "micro-batch of that step",
        "rank": "rank that trained on it",
        "module": "class of the module that was called with it",
        "matched": "how the served batch was found: content, order (not certain), or null",
        "indices": "rows of the dataset, as the data loader asked for them; null where that is unknown",
        "records": "ids that the batch carried, as texts; null where it carried none",
        "contents": "a mark of each row's content, where there are neither rows of a dataset nor ids; else null",
        "shapes": "shape of each tensor handed to the module, by name or position",
        "backward": "false for a batch with a non-finite loss that the script did not hand to backward",
        "padding": "zeros of a 2-D attention_mask",
        "valid_labels": "labels other than -100",
    },
    "partial": {"reason": "why what the probe sees is not all: finite can't be claimed"},
    "stopped": {
        "why": "event, steps or backwards",
        "steps": "steps taken",
        "backwards": "outermost backward calls",
        "tries": "how often the stop was raised, this time included",
        "forced": "whether the process was ended without its consent",
    },
    "raised": {"error": "the error that nobody caught and that ended the script"},
    "exit": {
        "steps": "steps taken",
        "backwards": "outermost backward calls",
        "events": "non-finite events, of which the first few are written",
        "repairs": "code -> times",
        "short": "optimizer steps that were wanted, where the training ended by itself before; else 0",
        "unfinished": "whether it ended after a forward that had no backward, and whose loss is not known",
        "unseen_since": "step after which optimizer state was looked at last, if steps came after it; else null",
        "seconds": "since the first backward",
        "probe_seconds": "the probe's own seconds in all, by the host's clock",
    },
    "died": {"thread": "a thread that trained and ended by an error", "error": "the error"},
    "probe_error": {"where": "what the probe was doing", "error": "what went wrong"},
}
