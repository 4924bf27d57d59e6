"""Settings that are known to bring NaN: why each is suspected, and which levels to compare. Data.

The one place for it: `init` writes matrices from this, in this order, and a report suggests from it what
a matrix left alone. What a trainer's setting does not take is left out there, so a level may be any
trainer's name for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nanbisect.matrix import Setting

NUMBERS = re.compile(r"[-+\d.,e]+")


@dataclass(frozen=True)
class Suspect:
    """Why a setting is suspected. `levels`, the safe one first; without any, all that the setting names.

    `worst` is the level likeliest to fail, the last one if not said. `usual` suspects are in a first matrix.
    """

    why: str
    levels: tuple[str, ...] = ()
    worst: str = ""
    usual: bool = False


SUSPECTS: Mapping[str, Suspect] = {
    "gradient_checkpointing": Suspect(
        "forward runs again inside backward: a cache that moved on, another kernel or other random numbers give "
        "other values the second time",
        ("off", "on"),
        usual=True,
    ),
    "batch_size": Suspect(
        "padding begins with the second record of a batch, and with it masked rows, rows without a label, and other "
        "kernels by shape",
        ("1", "2", "8"),
        usual=True,
    ),
    "channel_weights": Suspect(
        "a weight scales its channel's gradients, and a channel without labels can be 0/0 at any weight",
        ("1,8", "1,32"),
        usual=True,
    ),
    "attention": Suspect(
        "each kernel has its own way with masks: a row that may attend to nothing is 0/0 in one and 0 in another",
        ("sdpa", "eager", "flash"),
        worst="eager",
        usual=True,
    ),
    "precision": Suspect(
        "bf16 has 8 significant bits, and fp16 ends at 65504: sums overflow, mask constants become -Inf, small "
        "epsilons 0",
        ("fp32", "bf16"),
        usual=True,
    ),
    "padding_side": Suspect(
        "left padding under a causal mask makes rows that may attend to nothing, and moves positions",
        ("right", "left"),
        usual=True,
    ),
    "packing": Suspect(
        "records that share a row need positions, masks and kernels of their own, or see each other", ("off", "on")
    ),
    "padding_free": Suspect("batches flattened into one row take another path through attention", ("off", "on")),
    "loss_reduction": Suspect(
        "with a mean a channel, one label of a rare channel pulls as much as all labels of a common one",
        ("token_weighted", "mean_per_channel"),
    ),
    "gradient_accumulation": Suspect(
        "a micro-batch may hold no label at all, and a mean of means is not the mean", ("1", "4")
    ),
    "max_length": Suspect("a record that is cut may lose every label it had", ("2048", "256")),
    "param_dtype": Suspect(
        "in half precision small updates round away, and in fp16 AdamW's epsilon of 1e-8 is 0", ("fp32", "bf16")
    ),
    "adam_eps": Suspect("in fp16 1e-8 is 0: where the gradient is 0 too, AdamW divides 0 by 0", ("1e-4", "1e-8")),
    "upcast_layernorm": Suspect("the mean of squares of large activations overflows in fp16", ("on", "off")),
    "liger": Suspect("fused kernels for norms and loss have their own masks and reductions", ("off", "on")),
    "compile": Suspect("compiled code fuses operations, which can bring a NaN as well as hide one", ("off", "on")),
    "processes": Suspect("one rank may get the batch without labels, and its gradients go to all of them", ("1", "2")),
    "tf32": Suspect("matrix products round to 11 significant bits", ("off", "on")),
    "vit_gradient_checkpointing": Suspect("forward of the vision tower runs again inside backward", ("off", "on")),
    "gradient_checkpointing_scope": Suspect("says which part of the model runs its forward again"),
    "gradient_checkpointing_impl": Suspect("says whose checkpointing runs the forward again"),
    "deterministic": Suspect(
        "memory that nobody wrote is filled with NaN and shows itself; kernels change, too",
        ("off", "kernels+fill", "on"),
    ),
}

USUAL: Mapping[str, str] = {"precision": "bf16", "learning_rate": "2e-5", "gradient_accumulation": "1"}
"""What most runs have, for settings that a first matrix holds constant."""

CLASHES: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"attention": "flash", "precision": "fp32"}, "FlashAttention computes in half precision only"),
)
"""Combinations that no machine can run, and why."""


def levels_for(name: str, setting: Setting) -> tuple[str, ...]:
    """The levels to compare, as far as this trainer's setting takes them; () if it is no suspect.

    Of a setting that takes any text only numbers are known: names are its trainer's own.
    """
    suspect = SUSPECTS.get(name)
    if suspect is None:
        return ()
    open_ = setting.parse is str
    taken = [level for level in suspect.levels if setting.takes(level) and (not open_ or NUMBERS.fullmatch(level))]
    return tuple(taken) or setting.choices


def quick_levels(name: str, setting: Setting) -> tuple[str, ...]:
    """The safe level and the one likeliest to fail."""
    levels = levels_for(name, setting)
    worst = SUSPECTS[name].worst if levels else ""
    return tuple(dict.fromkeys((*levels[:1], worst if worst in levels else levels[-1]))) if levels else ()
