"""The catalogue as data, and what it makes of events that no CPU brings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nanbisect.causes import known, url
from nanbisect.causes.catalogue import ENTRIES, Entry
from nanbisect.outcome import Note, Outcome, Smear, Status

NOTHING = Outcome(Status.NONFINITE, "")
KERNEL = {"kernel": "cudnn", "queries": 192, "keys": 192, "modulo": [[0, 64], [0, 64]], "source": "train.py:9"}


def tensor(**changes: Any) -> dict[str, Any]:
    """A finite tensor as the probe describes it."""
    ends = {"min": -1.0, "max": 1.0, "absmax": 1.0, "nan": 0, "posinf": 0, "neginf": 0}
    return {"name": "x", "shape": [2, 3], "dtype": "float32", "numel": 6, **ends, **changes}


def event(operation: str, **changes: Any) -> dict[str, Any]:
    """An origin in backward, born of a finite tensor."""
    link = {"operation": f"aten.{operation}", "phase": "backward", "module": "layers.0", "source": "train.py:9"}
    origin = {**link, "kind": "nan", "label": "origin", "node": None, "inputs": [tensor()], "outputs": [tensor(nan=6)]}
    origin |= {key: changes.pop(key) for key in list(changes) if key in origin}
    return {"found": True, "origin": origin, "chain": [origin], "nan_at": 0, "step": 1, **changes}


def codes(*arguments: Any) -> set[str]:
    """Of all findings."""
    return {finding.code for finding in known(*arguments)}


CUDNN = "_scaled_dot_product_cudnn_attention_backward"


def test_cudnn_attention_is_known_by_kernel_and_length() -> None:
    """Its own backward, finite inputs, a length that is 64 modulo 128; each alone is not enough."""
    (finding,) = known(event(CUDNN, kernels=[KERNEL]), NOTHING)
    assert finding.code == "cudnn_attention"
    assert "192 queries and 192 keys" in finding.evidence
    assert not codes(event(CUDNN, kernels=[{**KERNEL, "modulo": [[0, 0], [0, 0]]}]), NOTHING)
    assert not codes(event(CUDNN, kernels=[{**KERNEL, "kernel": "flash"}]), NOTHING)
    assert not codes(event("bmm", kernels=[KERNEL]), NOTHING)
    assert not codes(event(CUDNN, kernels=[KERNEL], inputs=[tensor(nan=1)]), NOTHING)


def test_a_fused_attention_that_met_empty_rows() -> None:
    """The kernel's count of them is the evidence."""
    mask = [tensor(), tensor(neginf=6)]
    fused = {"phase": "forward", "label": "NaN from Inf", "inputs": mask}
    rows = {**KERNEL, "masked_rows": 3}
    operation = "_scaled_dot_product_flash_attention_for_cpu"
    (finding,) = known(event(operation, **fused, kernels=[rows]), NOTHING)
    assert (finding.code, finding.evidence.split(" in ")[0]) == (
        "fully_masked_rows",
        "the weights of 3 rows had no finite score",
    )
    assert not codes(event(operation, **fused, kernels=[{**rows, "masked_rows": None}]), NOTHING)


def test_a_softmax_over_plus_inf_is_no_masked_row() -> None:
    """Inf - Inf is NaN, too, and no mask made it."""
    scores = {"phase": "forward", "label": "NaN from Inf", "inputs": [tensor(neginf=3, posinf=1)]}
    assert not codes(event("_softmax", **scores), NOTHING)


@pytest.mark.parametrize(
    "trace", [None, {}, {"found": False, "origin": None, "reason": "nothing surfaced in that step"}]
)
def test_without_a_trace_it_speaks_of_the_outcome_alone(trace: Any) -> None:
    """Smears and repairs are in every outcome."""
    assert known(trace, NOTHING) == ()
    outcome = Outcome(
        Status.NONFINITE,
        "",
        smear=Smear("module.embed.weight", 8, 8, "head.weight"),
        repairs=(Note("zero_after_inf", "the norm was Inf"), Note("scaler_skip", "one step skipped")),
    )
    assert codes(trace, outcome) == {"smear_after_clipping", "clipped_to_zero"}


def test_an_event_with_nothing_but_an_operation_brings_nothing() -> None:
    """What is absent is no evidence, and no error."""
    for operation in ("aten._softmax", "aten.div", "aten.log", "aten.nll_loss_forward", "aten._foreach_addcdiv_", None):
        for phase in ("forward", "backward", "optimizer", "load", "recompute", "clip"):
            assert known({"found": True, "origin": {"operation": operation, "phase": phase}}, NOTHING) == ()


def test_codes_are_stable_and_distinct() -> None:
    """The report's readers may search for them; adding one is a decision."""
    assert [entry.code for entry in ENTRIES] == [
        *("fully_masked_rows", "mask_overflow", "zero_times_infinity", "hidden_by_masking"),
        *("ignored_labels", "empty_mean", "empty_mask_sum"),
        *("one_sample_spread", "epsilon_underflow", "zero_divisor", "outside_domain", "logarithm_of_zero"),
        *("unselected_where", "root_at_zero", "fp16_overflow", "fp16_gradient_overflow", "fp16_state_overflow"),
        *("norm_overflow", "adam_epsilon", "unsaved_buffer", "bad_at_start", "diverged", "bad_batch"),
        *("unwritten_memory", "recompute_differs", "cudnn_attention", "smear_after_clipping", "clipped_to_zero"),
    ]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.code)
def test_an_entry_is_one_line_each_with_references_that_lead_somewhere(entry: Entry) -> None:
    """Plain sentences; `owner/name#N`."""
    for text in (entry.sentence, entry.mend):
        assert text.endswith(".")
        assert text.isprintable()
        assert text.count("`") % 2 == 0
    for reference in entry.references:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", reference)
    assert url("pytorch/pytorch#41508") == "https://github.com/pytorch/pytorch/issues/41508"
