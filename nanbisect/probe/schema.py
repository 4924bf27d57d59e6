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
    "origin": {
        "step": "the traced step (NANBISECT_TRACE); one such event a process, written when that step is over",
        "micro_batch": "micro-batch in which it surfaced; null where nothing was found",
        "rank": "rank that traced",
        "found": "whether an origin was found",
        "reason": "why none was found; else null",
        "surfaced": "what the walk back started from: phase, value, name, micro_batch; null where nothing surfaced",
        "origin": "where it was born: ORIGIN below; null where not found",
        "chain": "from the birth to where it surfaced: LINK below each; a long one without its middle",
        "chain_length": "links of the whole chain",
        "nan_at": "place in `chain` of the first NaN; null where it stayed an Inf",
        "hidden_by": "operations that took it in and gave finite values out: LINK each",
        "before": "the last operations before the birth: operation, phase, module, source, shape, min, max",
        "jumps": "where absmax grew 100 times and more on the way to the birth: LINK with from, to",
        "kernels": "attention kernels and softmaxes that ran: KERNEL below, equal calls counted together",
        "use": "of a tied weight, the use that brought it: use (lookup or head), node, module, source; else null",
        "addends": "addends of the loss where its graph shows them: operation, module, source, bad (its value), "
        "reaches (whether its graph holds the operation that made the first bad gradient, null where unknown)",
        "loaded": "parameters and buffers that were bad or absurd before the traced step: name, what, value "
        "(or absurd), saved (false where no checkpoint holds it), absmax, nan, posinf, neginf, numel, first (index), "
        "first_use (LINK or null)",
        "operations": "operations seen",
        "seconds": "of the traced step, from its first forward to its end",
        "plain_seconds": "of the step before it, untraced; null where there is none",
        "traced_in_eager": "whether the training is compiled and this step was run without that",
    },
    "capsule": {
        "step": "step of the event that it was to be written for",
        "micro_batch": "micro-batch of that step",
        "rank": "rank whose state it has",
        "written": "whether it was",
        "reason": "why not; else null",
        "bytes": "size of its tensors",
        "seconds": "that it took",
    },
    "replay": {
        "step": "step that the capsule is of; null where it could not be read",
        "micro_batch": "micro-batch of that step in which it had surfaced",
        "rank": "rank that played it back",
        "refused": "why it can't be played back; else null",
        "handed": "batches handed out",
        "of": "batches that it has",
        "forwards": "training forwards of this step",
        "differs": "the first of these, from 0, whose inputs were other than in the original; null where none was",
        "seconds": "of reading and copying",
    },
    "partial": {"reason": "why what the probe sees is not all: finite can't be claimed"},
    "stopped": {
        "why": "event, steps, backwards, or replay (of a capsule that can't be used)",
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

LINK: Dict[str, str] = {
    "operation": "as torch dispatches it, without overload: aten._softmax",
    "phase": "load, data, forward, loss, backward, recompute, reduce, clip or optimizer",
    "module": "path of the module at work (in backward: of the forward); an empty text for the root; null outside one",
    "source": "file:line of the user's code; of a backward operation the line of its forward; null where unknown",
    "kind": "nan, +inf or -inf that it gave out; of a masking operation what it took in",
    "label": "origin, NaN from Inf, bad->bad, masking, intended Inf, unwritten storage, came by reduction",
    "node": "the autograd node at work, in backward; else null",
}

ORIGIN: Dict[str, str] = {
    **LINK,
    "name": "name of the parameter, buffer or batch tensor that brought it, or that was written; else null",
    "frames": "the user's frames from the innermost out: file:line function",
    "inputs": "TENSOR each",
    "outputs": "TENSOR each; of an operation that writes in place the written ones",
    "rows": "bad samples and positions: sample, positions (the first 32), count; null where the shape tells nothing",
    "sample": "of the first bad element, from 0; null where the shape tells nothing",
    "position": "the same",
    "channel": "the same",
    "allocated": "of unwritten storage, the operation that made it: operation, module, source; else null",
    "forward_was_finite": "of an operation in recompute: whether the same one in forward gave finite values; else null",
}

TENSOR: Dict[str, str] = {
    "name": "of a parameter or buffer, or the argument's name",
    "shape": "list",
    "dtype": "bfloat16, ...",
    "layout": "strided, sparse_coo, ...",
    "strides": "list; null where there are none",
    "contiguous": "whether it is",
    "min": "of the finite elements; null where there are none",
    "max": "the same",
    "absmax": "the same",
    "nan": "number of NaN",
    "posinf": "number of +Inf",
    "neginf": "number of -Inf",
    "numel": "number of elements",
    "first": "index of the first bad element; null where all are finite",
    "before": "whether this is a written tensor as it was before the operation",
}

KERNEL: Dict[str, str] = {
    "kernel": "flash, efficient, cudnn, overrideable, flash_cpu, math, eager softmax or another library's operation",
    "operation": "as dispatched",
    "phase": "forward, recompute or backward",
    "module": "path of the first module that called it",
    "source": "file:line",
    "calls": "how many",
    "queries": "length of the queries",
    "keys": "length of the keys",
    "modulo": "lengths of queries and keys modulo 64 and 128: [[q64, q128], [k64, k128]]",
    "masked_rows": "fully masked rows in all these calls; null where it can't be told",
    "dtype": "of the queries",
}
