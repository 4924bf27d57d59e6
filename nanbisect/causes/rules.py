"""A rule for each entry: the evidence in words, or None where it is not all there.

A rule looks at ranges and counts that the trace measured, never at names of modules or settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanbisect.causes.trace import (
    LARGEST,
    Tensor,
    Trace,
    absolute,
    all_zero,
    ends_at_zero,
    finite,
    largest,
    low,
    short,
)
from nanbisect.outcome import Outcome
from nanbisect.report.words import code, counted, figure

SOFTMAX = ("_softmax", "_safe_softmax")
FUSED = "_scaled_dot_product_"
DIVISIONS = ("div", "div_", "true_divide")
INVERSES = ("rsqrt", "rsqrt_", "reciprocal", "reciprocal_")
LOGARITHMS = ("log", "log2", "log10", "log_", "xlogy")
BELOW_ZERO = (*LOGARITHMS, "sqrt", "sqrt_", "rsqrt", "rsqrt_")
SINGULAR = (*DIVISIONS, *INVERSES, *LOGARITHMS)
PRODUCTS = ("mul", "mul_")
SUMS = ("sum", "count_nonzero")
ADDITIONS = ("add", "add_")
MEANS = ("mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div")
SPREADS = ("std", "var", "std_mean", "var_mean")
COMPUTED = ("forward", "loss", "recompute")
ROOTS = ("SqrtBackward", "LinalgVectorNormBackward", "NormBackward", "PowBackward")
UNCHOSEN = (*ROOTS, "LogBackward", "DivBackward", "ReciprocalBackward", "RsqrtBackward")
WHOLE: Tensor = {"dtype": "int64"}
NEAR = 6  # operations before the birth that can have made its operands


# masks -----------------------------------------------------------------------------------------


def fully_masked_rows(trace: Trace, outcome: Outcome) -> str | None:
    """A softmax, alone or inside a fused attention, met rows in which every score was an intended -Inf."""
    if trace.kind != "nan" or not any(t.get("neginf") for t in trace.inputs):
        return None
    if any(t.get("nan") or t.get("posinf") for t in trace.inputs):
        return None
    if trace.operation in SOFTMAX:
        rows = _rows(trace.outputs)
    elif trace.operation.startswith(FUSED):
        rows = sum(kernel.get("masked_rows") or 0 for kernel in _kernels(trace))
    else:
        return None
    if not rows:
        return None
    return f"the weights of {counted(rows, 'row')} had no finite score{trace.place}"


def mask_overflow(trace: Trace, outcome: Outcome) -> str | None:
    """Numbers near the lowest of their precision were added, scaled or cast, and gave -Inf to a softmax."""
    if trace.kind != "-inf" or not trace.born_of_finite(*COMPUTED) or not trace.outputs:
        return None
    target, lowest = short(trace.first_nan), min(map(low, trace.inputs), default=0.0)
    if not (target in SOFTMAX or target.startswith(FUSED)) or not lowest <= -largest(trace.outputs[0]) / 2:
        return None
    precision = trace.outputs[0].get("dtype")
    return f"{code(trace.operation)} took {figure(lowest)} and gave -Inf in {precision}{trace.place}"


def zero_times_infinity(trace: Trace, outcome: Outcome) -> str | None:
    """A product of finite tensors is never NaN: one factor was a plain number, and Inf, as the other elements show."""
    if trace.kind != "nan" or trace.operation not in PRODUCTS or not trace.born_of_finite(*COMPUTED):
        return None
    infinite = any(t.get("posinf") or t.get("neginf") for t in trace.outputs)
    if len(trace.inputs) != 1 or not infinite:
        return None
    return f"{code(trace.operation)} of one tensor gave NaN where it is 0 and Inf elsewhere{trace.place}"


def hidden_by_masking(trace: Trace, outcome: Outcome) -> str | None:
    """The forward pass replaced the bad values, and backward met what had been saved of them."""
    links = trace.event.get("hidden_by") or ()
    surfaced = trace.event.get("surfaced") or {}
    if not links or trace.phase not in COMPUTED or surfaced.get("phase") != "backward":
        return None
    at = f" at {code(str(links[0]['source']))}" if links[0].get("source") else ""
    return f"{code(short(links[0]))}{at} took in the bad values and gave finite ones, and the gradient is non-finite"


# nothing to average, nothing to divide by -------------------------------------------------------


def ignored_labels(trace: Trace, outcome: Outcome) -> str | None:
    """A cross entropy whose total weight is zero."""
    counts = [t for t in trace.outputs if t.get("numel") == 1]
    if not trace.operation.startswith("nll_loss") or trace.kind != "nan" or not any(map(all_zero, counts)):
        return None
    return f"the total weight of the labels was 0{trace.place}"


def empty_mean(trace: Trace, outcome: Outcome) -> str | None:
    """The mean of a tensor without an element."""
    empty = [t for t in trace.inputs if t.get("numel") == 0]
    if trace.operation not in MEANS or trace.kind != "nan" or not empty:
        return None
    return f"{code(trace.operation)} of a tensor of shape {list(empty[0]['shape'])}{trace.place}"


def empty_mask_sum(trace: Trace, outcome: Outcome) -> str | None:
    """0/0 where the divisor is a sum or a whole number: nothing was counted."""
    divisor = _zero_divisor(trace)
    if divisor is None or trace.kind != "nan":
        return None
    if _whole(divisor):
        return f"0 was divided by a whole number that is 0{trace.place}"
    return f"0 was divided by a sum that is 0{trace.place}" if _maker(trace, divisor, SUMS) else None


def one_sample_spread(trace: Trace, outcome: Outcome) -> str | None:
    """The standard deviation of single elements."""
    if trace.operation not in SPREADS or trace.kind != "nan" or not trace.born_of_finite(*COMPUTED):
        return None
    if not trace.inputs or not trace.outputs or trace.inputs[0].get("numel") != trace.outputs[0].get("numel"):
        return None
    return f"{code(trace.operation)} over one element{trace.place}"


def epsilon_underflow(trace: Trace, outcome: Outcome) -> str | None:
    """In fp16, what was added to the divisor left it at zero."""
    divisor = _zero_divisor(trace)
    if divisor is None or divisor.get("dtype") != "float16" or _maker(trace, divisor, ADDITIONS) is None:
        return None
    return f"after an addition in float16 the input of {code(trace.operation)} was still 0{trace.place}"


def zero_divisor(trace: Trace, outcome: Outcome) -> str | None:
    """A zero divisor of any other origin."""
    if _zero_divisor(trace) is None or empty_mask_sum(trace, outcome) or epsilon_underflow(trace, outcome):
        return None
    return f"the divisor of {code(trace.operation)} was 0{trace.place}"


def outside_domain(trace: Trace, outcome: Outcome) -> str | None:
    """The logarithm or root of a negative number."""
    if trace.kind != "nan" or trace.operation not in BELOW_ZERO or not trace.born_of_finite(*COMPUTED):
        return None
    lowest = min(map(low, trace.inputs), default=0.0)
    return f"{code(trace.operation)} of {figure(lowest)}{trace.place}" if lowest < 0 else None


def logarithm_of_zero(trace: Trace, outcome: Outcome) -> str | None:
    """-Inf from a logarithm."""
    if trace.kind != "-inf" or trace.operation not in LOGARITHMS or not trace.born_of_finite(*COMPUTED):
        return None
    return f"{code(trace.operation)} of 0{trace.place}" if any(map(ends_at_zero, trace.inputs)) else None


# derivatives -----------------------------------------------------------------------------------


def unselected_where(trace: Trace, outcome: Outcome) -> str | None:
    """The gradient that a selection had made zero met an infinite derivative."""
    if (
        trace.node not in UNCHOSEN
        or trace.kind != "nan"
        or not _selected(trace)
        or not trace.born_of_finite("backward")
    ):
        return None
    return f"a selection gave a gradient with a 0, which met the infinite derivative in {code(trace.node)}{trace.place}"


def root_at_zero(trace: Trace, outcome: Outcome) -> str | None:
    """The derivative of a root whose result was zero."""
    if trace.node not in ROOTS or not trace.born_of_finite("backward"):
        return None
    if trace.operation not in (*DIVISIONS, "mul", "pow") or not any(map(ends_at_zero, trace.inputs)):
        return None
    return f"the derivative of a root whose result was 0{trace.place}"


# precision -------------------------------------------------------------------------------------


def fp16_overflow(trace: Trace, outcome: Outcome) -> str | None:
    """A result beyond 65504 on the way to the loss."""
    return None if mask_overflow(trace, outcome) else _overflow(trace, *COMPUTED)


def fp16_gradient_overflow(trace: Trace, outcome: Outcome) -> str | None:
    """A gradient beyond 65504."""
    return _overflow(trace, "backward")


def fp16_state_overflow(trace: Trace, outcome: Outcome) -> str | None:
    """Optimizer state beyond 65504."""
    return _overflow(trace, "optimizer")


def norm_overflow(trace: Trace, outcome: Outcome) -> str | None:
    """Finite gradients whose norm is not."""
    if trace.kind != "+inf" or "norm" not in trace.operation or not trace.born_of_finite("clip"):
        return None
    most = max(map(absolute, trace.inputs), default=0.0)
    return f"finite values up to {figure(most)}, and a norm of Inf{trace.place}"


def adam_epsilon(trace: Trace, outcome: Outcome) -> str | None:
    """The update divided by a root that is zero, with its epsilon."""
    if "addcdiv" not in trace.operation or not trace.born_of_finite("optimizer"):
        return None
    roots = [t for t in trace.inputs if t.get("name") == "tensor2" and low(t) == 0]
    return f"{code(trace.operation)} divided by a root plus epsilon that is 0{trace.place}" if roots else None


# what was there before the step -----------------------------------------------------------------


def unsaved_buffer(trace: Trace, outcome: Outcome) -> str | None:
    """A buffer that no checkpoint holds was bad when the step began."""
    entry = _loaded(trace)
    if entry is None or entry.get("saved") is not False:
        return None
    return f"{_held(trace, entry)}; no checkpoint holds this buffer"


def bad_at_start(trace: Trace, outcome: Outcome) -> str | None:
    """A parameter, or a buffer that a checkpoint holds, was bad when the step began."""
    entry = _loaded(trace)
    return None if entry is None or entry.get("saved") is False else _held(trace, entry)


def diverged(trace: Trace, outcome: Outcome) -> str | None:
    """Finite inputs overflowed in a step that began with parameters of absurd size."""
    absurd = [e for e in trace.event.get("loaded") or () if e.get("value") == "absurd" and e.get("what") == "parameter"]
    late = trace.event.get("step", 1) > 1
    if not absurd or not late or not trace.kind.endswith("inf") or not trace.born_of_finite(*COMPUTED):
        return None
    worst = max(absurd, key=absolute)
    name, size = code(str(worst.get("name"))), figure(absolute(worst))
    return f"step {trace.event['step']} began with values up to {size} in {name}"


def bad_batch(trace: Trace, outcome: Outcome) -> str | None:
    """The batch itself held it."""
    if trace.phase != "data":
        return None
    bad = next((t for t in trace.inputs if not finite(t)), None)
    name = str(trace.origin.get("name") or "")
    what = (
        f"argument {name} of the model" if name.isdigit() else code(name) if name else "a tensor from outside the model"
    )
    held = f" held {_counts(bad)}" if bad is not None else " was bad"
    return f"{what}{held}; first used by {code(trace.operation)}{trace.place}"


def unwritten_memory(trace: Trace, outcome: Outcome) -> str | None:
    """Fresh memory was read before it was written."""
    if trace.origin.get("label") != "unwritten storage":
        return None
    made = trace.origin.get("allocated") or {}
    by = f", made by {code(short(made))}" if made else ""
    at = f" at {code(str(made['source']))}" if made.get("source") else ""
    return f"{code(trace.operation)} read memory that nothing had written{trace.place}{by}{at}"


# recomputation, kernels, clipping ---------------------------------------------------------------


def recompute_differs(trace: Trace, outcome: Outcome) -> str | None:
    """The same operation was finite in the forward pass."""
    if trace.phase != "recompute" or trace.origin.get("forward_was_finite") is not True:
        return None
    return f"{code(trace.operation)} was finite in forward and not in its recomputation{trace.place}"


def cudnn_attention(trace: Trace, outcome: Outcome) -> str | None:
    """cuDNN's attention backward gave NaN from finite inputs at the length where it did so before."""
    cudnn = [kernel for kernel in _kernels(trace) if kernel.get("kernel") == "cudnn"]
    lengths = [kernel for kernel in cudnn if [0, 64] in (kernel.get("modulo") or ())]
    backward = trace.operation.startswith("_scaled_dot_product_cudnn_attention_backward")
    if not backward or not lengths or not trace.born_of_finite("backward"):
        return None
    sizes = f"{lengths[0].get('queries')} queries and {lengths[0].get('keys')} keys"
    return f"cuDNN's attention backward gave {trace.kind} from finite inputs, with {sizes}{trace.place}"


def smear_after_clipping(trace: Trace, outcome: Outcome) -> str | None:
    """A check after clipping would have named another parameter."""
    smear = outcome.smear
    if smear is None or not smear.misleads:
        return None
    blamed, first = code(smear.blamed), code(smear.first)
    return f"after clipping {smear.bad} of {smear.numel} elements of {blamed} were bad; the first to arrive was {first}"


def clipped_to_zero(trace: Trace, outcome: Outcome) -> str | None:
    """Clipping by an infinite norm made finite gradients zero."""
    return next((note.text for note in outcome.repairs if note.code == "zero_after_inf"), None)


# helpers ---------------------------------------------------------------------------------------


def _rows(outputs: Sequence[Tensor]) -> int:
    """Rows of the last dimension that are NaN as a whole."""
    if not outputs or not outputs[0].get("shape"):
        return 0
    width = outputs[0]["shape"][-1]
    return int(outputs[0]["nan"] // width) if width else 0


def _kernels(trace: Trace) -> Sequence[Tensor]:
    """Attention kernels that ran at the origin's line, or anywhere where none is named there."""
    every = trace.event.get("kernels") or ()
    return [kernel for kernel in every if kernel.get("source") == trace.origin.get("source")] or every


def _zero_divisor(trace: Trace) -> Tensor | None:
    """The divisor (of a division the second input, of an inverse the only one) if zero is in it.

    A quotient of finite numbers is NaN only for 0/0, so that the divisor's range need not be known then. A
    division that shows one tensor only is by a number of the script.
    """
    place = 1 if trace.operation in DIVISIONS else 0 if trace.operation in INVERSES else None
    phases = (*COMPUTED, "backward") if trace.node == "DivBackward" else COMPUTED
    if place is None or not trace.inputs or not trace.born_of_finite(*phases):
        return None
    divisor = trace.inputs[place] if place < len(trace.inputs) else WHOLE
    certain = trace.kind == "nan" and place == 1
    return divisor if certain or low(divisor) == 0 or all_zero(divisor) else None


def _whole(tensor: Tensor) -> bool:
    """Whether it is no floating-point tensor."""
    return str(tensor.get("dtype")).startswith(("int", "uint", "bool"))


def _maker(trace: Trace, tensor: Tensor, operations: Sequence[str]) -> str | None:
    """The operation before the birth that gave a tensor of this shape and range, if it is one of these."""
    for link in trace.before(NEAR, phase=trace.phase):
        same = (link.get("shape"), link.get("min"), link.get("max"))
        if same == (tensor.get("shape"), tensor.get("min"), tensor.get("max")):
            return short(link) if short(link) in operations else None
    return None


def _selected(trace: Trace) -> bool:
    """Whether the gradient came out of the backward of a selection, with zeros in it."""
    shapes = [t.get("shape") for t in trace.inputs]
    links = trace.before(NEAR, phase="backward")
    return any(short(link) in ("where", "masked_fill") and link.get("shape") in shapes for link in links)


def _overflow(trace: Trace, *phases: str) -> str | None:
    """Finite inputs, an Inf in fp16, and no division by zero."""
    if not trace.kind.endswith("inf") or not trace.born_of_finite(*phases):
        return None
    half = [t for t in trace.outputs if t.get("dtype") == "float16" and not finite(t)]
    if not half or (trace.operation in SINGULAR and any(map(ends_at_zero, trace.inputs))):
        return None
    most = max(map(absolute, trace.inputs), default=0.0)
    bound = figure(LARGEST["float16"])
    return (
        f"{code(trace.operation)} took values up to {figure(most)} and gave Inf in float16, beyond {bound}{trace.place}"
    )


def _loaded(trace: Trace) -> Tensor | None:
    """The parameter or buffer that was bad before the step and brought it."""
    if trace.phase != "load":
        return None
    name = trace.origin.get("name")
    return next((entry for entry in trace.event.get("loaded") or () if entry.get("name") == name), None)


def _held(trace: Trace, entry: Tensor) -> str:
    when = f"before step {trace.event.get('step', 1)}"
    return (
        f"{code(str(entry['name']))} held {_counts(entry)} {when}; first used by {code(trace.operation)}{trace.place}"
    )


def _counts(tensor: Tensor) -> str:
    """`3 NaN and 1 Inf of 64 values`."""
    infinite = (tensor.get("posinf") or 0) + (tensor.get("neginf") or 0)
    parts = [f"{count} {word}" for count, word in ((tensor.get("nan") or 0, "NaN"), (infinite, "Inf")) if count]
    return f"{' and '.join(parts)} of {counted(tensor.get('numel') or 0, 'value')}"
