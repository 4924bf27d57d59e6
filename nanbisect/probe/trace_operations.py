"""What an operation's schema and name say about it: what it writes, makes, hides. Asked once an overload."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

EMPTY = re.compile(r"^aten\.(empty|new_empty|resize_)(_|$)|^aten\.empty_(like|strided|permuted)$")
VIEW = re.compile(r"^aten\.(_unsafe_view|_reshape_alias)$")
# an Inf that these give out of finite tensors was put there: a mask's constant
CONSTANT = re.compile(
    r"^aten\.((new_)?full(_like)?|fill_?|scalar_tensor|lift_fresh(_copy)?|masked_fill_?|where|constant_pad_nd"
    r"|index_fill_?|_to_tensor)$"
)
SHAPED = re.compile(r"_like$|^aten\.new_|^aten\.(numel|size|sym_)")  # take shapes of their inputs, not values
STATISTICS = ("running_mean", "running_var")  # written by every batch norm, and no schema says so
SHARED = re.compile(r"^_?c10d")  # collectives: what they write comes later, and from other processes
LOSS = re.compile(r"^aten\.\w*(_loss|_loss_forward|_loss2d_forward|binary_cross_entropy(_with_logits)?)$")
KERNEL = re.compile(r"attention|flash_attn|flash_fwd|^aten\._?(safe_)?softmax$", re.IGNORECASE)

Named = List[Tuple[str, torch.Tensor]]  # (argument's name, tensor)


class About(NamedTuple):
    """`written`: place and name of the arguments that it writes. `view`: it computes nothing."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[tuple[int, str], ...]
    view: bool
    empty: bool
    constant: bool
    shaped: bool
    shared: bool
    loss: bool
    kernel: bool


_known: Dict[Any, About] = {}


def about(function: Any) -> About:
    """What is known of an overload."""
    known = _known.get(function)
    if known is None:
        known = _known[function] = _ask(function)
    return known


def _ask(function: Any) -> About:
    if not hasattr(function, "_schema"):
        return _higher(function)
    name, schema = str(function).rsplit(".", 1)[0], function._schema
    arguments = tuple(argument.name for argument in schema.arguments)
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or ("batch_norm" in name and argument.name in STATISTICS)
    ]
    aliases = [each.alias_info is not None and not each.alias_info.is_write for each in schema.returns]
    return About(
        name=name,
        arguments=arguments,
        written=tuple(written),
        view=bool(VIEW.match(name)) or (bool(aliases) and all(aliases) and not written),
        empty=bool(EMPTY.match(name)),
        constant=bool(CONSTANT.match(name)),
        shaped=bool(SHAPED.search(name)),
        shared=bool(SHARED.match(name)),
        loss=bool(LOSS.match(name)),
        kernel=bool(KERNEL.search(name)),
    )


def _higher(function: Any) -> About:
    """An operator that takes functions, such as flex_attention."""
    name = "higher_order.%s" % getattr(function, "_name", type(function).__name__)
    return About(name, (), (), False, False, False, False, False, False, bool(KERNEL.search(name)))


def inputs(known: About, args: Any, kwargs: Any) -> Named:
    """Tensors handed to an operation."""
    found: Named = []
    for name, value in zip(known.arguments or map(str, range(len(args))), args):
        _add(found, name, value)
    for name, value in kwargs.items():
        _add(found, name, value)
    return found


def outputs(result: Any) -> Named:
    """Tensors that it returned."""
    found: Named = []
    _add(found, "", result)
    return found


def written(known: About, args: Any, kwargs: Any) -> Named:
    """Tensors that it will write."""
    found: Named = []
    for place, name in known.written:
        _add(found, name, args[place] if place < len(args) else kwargs.get(name))
    return found


def _add(found: Named, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(found, name, each)


def infinite_scalar(args: Any, kwargs: Any) -> bool:
    """Whether a plain number that was handed over is infinite: an Inf is then what was asked for."""
    return any(type(each) is float and each in (float("inf"), float("-inf")) for each in (*args, *kwargs.values()))


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: the values of a sparse one, this rank's part of a sharded one."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor
    part = getattr(tensor, "_local_tensor", tensor)
    if part.layout is not torch.strided:
        return part._values() if part.is_sparse else part.values()
    return part


def memory(tensor: torch.Tensor) -> Tuple[Optional[int], bool]:
    """The number of its storage, and whether the tensor is all of that."""
    try:
        part = held(tensor)
        storage = part.untyped_storage()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None, True
    return int(storage._cdata), part.numel() * part.element_size() >= storage.nbytes()


def storage(tensor: torch.Tensor) -> Optional[int]:
    """A number for the memory of a tensor, as long as that lives; None for one without memory of its own."""
    try:
        return int(held(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def floating(tensor: torch.Tensor) -> bool:
    """Whether it can hold a bad value."""
    return tensor.is_floating_point() or tensor.is_complex()
