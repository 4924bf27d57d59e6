"""The published faults, as data: a rule, what it means, what mends it, and public reports of the same kind, with a
cause that was found or narrowed down.

An entry without a report is plain arithmetic. Every entry has a training in `tests/cases` that brings it, and does
not speak when its evidence is edited out of that training's trace (of a fused GPU kernel the tests write out events).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanbisect.causes import rules
from nanbisect.causes.trace import Trace
from nanbisect.outcome import Outcome


@dataclass(frozen=True)
class Entry:
    """One fault. `rule` returns its evidence in words, or None where that is not all there."""

    rule: Callable[[Trace, Outcome], str | None]
    sentence: str
    mend: str
    references: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Stable; the rule's name."""
        return self.rule.__name__


ENTRIES = (
    Entry(
        rules.fully_masked_rows,
        "A softmax over a row in which everything is masked with -Inf is 0/0. Padding at the start of a record "
        "together with a causal or windowed mask leaves such rows.",
        "Let rows without a key attend to something (set their scores to 0 before the softmax), or use torch's own "
        "attention, which returns 0 there since 2.5. Zeroing the result does not help: backward meets the saved NaN.",
        ("pytorch/pytorch#41508", "pytorch/pytorch#103749", "Xilinx/brevitas#1591", "huggingface/transformers#38690"),
    ),
    Entry(
        rules.mask_overflow,
        "A mask of the lowest finite number became -Inf: two masks were added, a float32 mask was cast to a shorter "
        "precision, or a negative score was added. A row in which everything is masked is then 0/0 in the softmax.",
        "Combine masks as booleans and fill once (`masked_fill`); take `torch.finfo` of the scores' own precision.",
        ("huggingface/transformers#27114", "allenai/OLMo#322", "huggingface/transformers#25065"),
    ),
    Entry(
        rules.zero_times_infinity,
        "A tensor was multiplied by Inf, and 0 times Inf is NaN: `(1 - mask) * -inf` is NaN wherever the mask is 1.",
        "Fill instead of multiplying: `masked_fill(mask == 0, -inf)`, or `where`.",
    ),
    Entry(
        rules.hidden_by_masking,
        "The forward pass replaced the bad values, so the loss may look healthy. Backward multiplies what was saved "
        "of them by a gradient of 0, and 0 times NaN is NaN.",
        "Mask the input of the operation that makes the NaN, not its result.",
        ("Xilinx/brevitas#1591", "pytorch/pytorch#41508"),
    ),
    Entry(
        rules.ignored_labels,
        "A cross entropy whose labels are all ignored is 0/0. Its gradient may be 0 nevertheless.",
        "Sum the loss and divide by the number of labels, at least 1; or leave out micro-batches without a label. "
        "Look at the record: a prompt that fills the whole length, or an answer that was cut off.",
        ("pytorch/pytorch#70348", "karpathy/nanochat#590", "NVIDIA-NeMo/Automodel#3796"),
    ),
    Entry(
        rules.empty_mean,
        "The mean over nothing is 0/0. A weight of 0 does not help: 0 times NaN is NaN.",
        "Leave out a head or channel without an example in the batch, or divide the sum by the count, at least 1.",
        ("JayYip/m3tl#35", "open-mmlab/mmpretrain#1426", "open-mmlab/mmdetection#2680"),
    ),
    Entry(
        rules.empty_mask_sum,
        "A masked mean over a mask that is all zeros is 0/0: a channel without a label, an answer that was cut off, a "
        "record without a token.",
        "Clamp the count to at least 1, and look at why the record has nothing to count.",
        ("verl-project/verl#785", "huggingface/trl#1033", "huggingface/trl#5662", "allenai/OLMo-core#452"),
    ),
    Entry(
        rules.one_sample_spread,
        "The standard deviation (or variance) of one value is 0/0, unless it is taken with `correction=0`.",
        "Leave a group of one out, or use `correction=0` and an epsilon.",
    ),
    Entry(
        rules.epsilon_underflow,
        "The epsilon is too small for fp16, where all below 6e-8 is 0, so that it does not keep the divisor from 0.",
        "Compute the norm in float32, or use an epsilon of at least 1e-6.",
        ("pytorch/pytorch#183605",),
    ),
    Entry(
        rules.zero_divisor,
        "A division by zero: 0/0 is NaN, anything else Inf.",
        "Add an epsilon to the divisor (inside a root, not after it), or choose the elements before the division.",
    ),
    Entry(
        rules.outside_domain,
        "The logarithm or square root of a negative number is NaN. The gradients may be finite all the same, and then "
        "`detect_anomaly` is silent.",
        "Make the argument positive by construction (softplus or exp), or clamp it before the operation.",
    ),
    Entry(
        rules.logarithm_of_zero,
        "The logarithm of zero is -Inf; multiplied by a probability of 0 it becomes NaN.",
        "Use `log_softmax`, `logsigmoid` or `xlogy`, or clamp the argument before the logarithm.",
    ),
    Entry(
        rules.unselected_where,
        "Where an element is not chosen (by `where`, a mask or a clamp), its gradient is 0, and the derivative of the "
        "operation before is infinite there: 0 times infinity is NaN.",
        "Choose the input of the operation first: `torch.where(ok, x, 1).sqrt()`, or an epsilon inside. What comes "
        "after the operation can't help.",
        ("pytorch/pytorch#4132", "pytorch/pytorch#68425", "pytorch/pytorch#156212", "mpariente/pytorch_stoi#7"),
    ),
    Entry(
        rules.root_at_zero,
        "The derivative of a square root or norm at 0 is infinite: a silent record, a vector of zeros.",
        "Put an epsilon inside the root. A clamp after it is useless.",
        ("pytorch/pytorch#2421", "pytorch/pytorch#6394", "mpariente/pytorch_stoi#7"),
    ),
    Entry(
        rules.fp16_overflow,
        "A number beyond fp16's largest, 65504, became Inf. The NaN comes later, often in the next normalisation.",
        "Train in bf16, or compute this operation (and the sum it goes into) in float32.",
        ("huggingface/transformers#5651", "huggingface/transformers#10956", "huggingface/transformers#39972"),
    ),
    Entry(
        rules.fp16_gradient_overflow,
        "A gradient beyond fp16's largest number, 65504, became Inf. A loss scale that never falls makes it certain.",
        "Use a GradScaler, which lowers its scale and skips the step, or train in bf16.",
    ),
    Entry(
        rules.fp16_state_overflow,
        "The optimizer's state is in fp16, and a squared gradient beyond 65504 became Inf there.",
        "Keep parameters and optimizer state in float32 (autocast instead of `.half()`).",
    ),
    Entry(
        rules.norm_overflow,
        "Every gradient is finite, and the sum of their squares is not. Clipping by a norm of Inf makes all of them 0.",
        "Take the norm in float32 (or float64), and lower the loss scale.",
        ("facebookresearch/fairscale#263", "facebookresearch/fairseq#2384"),
    ),
    Entry(
        rules.adam_epsilon,
        "Adam divides by the root of the squared gradients plus epsilon. Where a gradient was 0 and epsilon is 0 (1e-8 "
        "is 0 in fp16), that is 0/0.",
        "Use an epsilon of at least 1e-6 in fp16, or keep parameters and optimizer state in float32.",
        ("pytorch/pytorch#147437", "NVIDIA/apex#240", "google-deepmind/optax#1754"),
    ),
    Entry(
        rules.unsaved_buffer,
        "A buffer was bad before the step. A non-persistent buffer is in no checkpoint: a model that was built without "
        "memory and then loaded has whatever was there.",
        "Compute the buffer again after loading, in `_init_weights` or `reset_parameters`, or make it persistent.",
        ("huggingface/transformers#45902", "huggingface/transformers#48892", "macwiatrak/Bacformer#33"),
    ),
    Entry(
        rules.bad_at_start,
        "A parameter or buffer was bad before the step: it was missing from the checkpoint and never initialised, the "
        "checkpoint holds it so, or an earlier step left it.",
        "Look at the list of missing keys when loading, initialise what is new, and look at the checkpoint itself.",
        ("huggingface/transformers#45050", "karpathy/nanochat#686"),
    ),
    Entry(
        rules.diverged,
        "The parameters had grown beyond measure in the steps before: training diverged, and the Inf is where it ends.",
        "Look at the losses of the steps before; lower the learning rate, warm up, or clip the gradients.",
    ),
    Entry(
        rules.bad_batch,
        "The NaN or Inf was there before the model was called: in the batch, or in what was computed of it before. "
        "Multiplying by a mask of zeros does not remove it.",
        "Look at the record. Where it is padding, use `masked_fill` on the input instead of a product with a mask.",
        ("pytorch/pytorch#101967", "pytorch/pytorch#88474"),
    ),
    Entry(
        rules.unwritten_memory,
        "Fresh memory was read before it was written. What it holds is chance, so that the NaN comes and goes; "
        "deterministic mode fills it with NaN and makes it certain.",
        "Fill the memory when it is made (`zeros` instead of `empty`), or write all of it.",
        ("karpathy/nanochat#686", "facebookresearch/xformers#1025", "Dao-AILab/flash-attention#2541"),
    ),
    Entry(
        rules.recompute_differs,
        "Gradient checkpointing ran the block a second time, with another result: it drew other random numbers, or met "
        "a state that its first run had changed.",
        "Keep `preserve_rng_state=True`, and change no state (caches, counters) inside a checkpointed block.",
        ("huggingface/transformers#28056", "huggingface/transformers#46572", "pytorch/pytorch#190758"),
    ),
    Entry(
        rules.cudnn_attention,
        "cuDNN's attention backward overflows in the last tile where a length is 64 modulo 128, a mask is given, and a "
        "row's scores are very low.",
        "`torch.backends.cuda.enable_cudnn_sdp(False)`, or another attention.",
        ("pytorch/pytorch#196678", "huggingface/trl#7181", "NVIDIA-NeMo/Automodel#2208"),
    ),
    Entry(
        rules.smear_after_clipping,
        "Clipping multiplies every gradient by `max_norm / norm`; a norm of NaN makes all of them NaN. Whoever looks "
        "after clipping finds the first registered parameter, wholly bad, wherever it began.",
        "Look at gradients before clipping.",
        ("OpenMOSS/MOSS-TTS#196", "pytorch/pytorch#46849"),
    ),
    Entry(
        rules.clipped_to_zero,
        "Clipping by a norm of Inf makes every finite gradient 0, so that the step looks healthy and learns nothing.",
        "Pass `error_if_nonfinite=True` to `clip_grad_norm_`, or look at the norm.",
        ("pytorch/pytorch#46849", "Lightning-AI/pytorch-lightning#9794"),
    ),
)
