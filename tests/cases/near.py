"""Near misses: what to change in a trace so that a cause's evidence is no longer there, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanbisect.outcome import Outcome

Change = tuple[str, Any]

CHANGES: Mapping[str, tuple[Change, ...]] = {
    "fully_masked_rows": (("origin.inputs.*.neginf", 0),),
    "mask_overflow": (("origin.inputs.*.min", -20.0),),
    "zero_times_infinity": (("origin.outputs.0.neginf", 0),),
    "hidden_by_masking": (("hidden_by", []),),
    "ignored_labels": (("origin.outputs.*.absmax", 3.0),),
    "empty_mean": (("origin.inputs.*.numel", 5),),
    "empty_mask_sum": (("origin.inputs.*.absmax", 1.0), ("origin.kind", "+inf")),
    "one_sample_spread": (("origin.inputs.0.numel", 5),),
    "epsilon_underflow": (("origin.inputs.0.dtype", "float32"),),
    "zero_divisor": (("origin.inputs.*.posinf", 1),),
    "outside_domain": (("origin.inputs.0.min", 0.5),),
    "logarithm_of_zero": (("origin.inputs.0.min", 0.5),),
    "unselected_where": (("before", []),),
    "root_at_zero": (("origin.inputs.*.min", -0.5), ("origin.inputs.*.max", 0.5)),
    "fp16_overflow": (("origin.outputs.*.dtype", "float32"),),
    "fp16_gradient_overflow": (("origin.outputs.*.dtype", "bfloat16"),),
    "fp16_state_overflow": (("origin.outputs.*.dtype", "float32"),),
    "norm_overflow": (("origin.inputs.*.posinf", 1),),
    "adam_epsilon": (("origin.inputs.*.min", 1e-6),),
    "unsaved_buffer": (("loaded.*.saved", True),),
    "bad_at_start": (("loaded", []),),
    "diverged": (("loaded", []),),
    "bad_batch": (("origin.phase", "forward"),),
    "unwritten_memory": (("origin.label", "origin"),),
    "recompute_differs": (("origin.forward_was_finite", False),),
}


def without(code: str, event: Mapping[str, Any], outcome: Outcome) -> tuple[Mapping[str, Any], Outcome]:
    """The same attempt without the evidence of this cause."""
    if code == "smear_after_clipping":
        assert outcome.smear is not None
        return event, replace(outcome, smear=replace(outcome.smear, blamed=outcome.smear.first))
    if code == "clipped_to_zero":
        return event, replace(outcome, repairs=())
    changed = copy.deepcopy(dict(event))
    for path, value in CHANGES[code]:
        _set(changed, path.split("."), value)
    return changed, outcome


def _set(tree: Any, path: list[str], value: Any) -> None:
    """Set what is there at the path; `*` is every element of a list."""
    key, *rest = path
    keys: list[Any] = list(range(len(tree))) if key == "*" else [int(key)] if isinstance(tree, list) else [key]
    for each in keys:
        assert isinstance(tree, list) or each in tree
        if rest:
            _set(tree[each], rest, value)
        else:
            tree[each] = value
