"""What the graph of a loss shows before its backward runs: its addends, and each use of a tied weight."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, NamedTuple, Set, Tuple

import torch

from .graph import Walk

PASSED = re.compile(r"^(Mul|Div|ToCopy|View|UnsafeView|Reshape|Neg|Squeeze|Alias|Clone)Backward")
SPLIT = re.compile(r"^(Add|Sub|Stack|Cat|Unsqueeze)Backward")
SUMMED = re.compile(r"^(Sum|Mean)Backward")
ADDENDS = 16
NODES = 1 << 17  # looked at below all addends together


class Addend(NamedTuple):
    """One addend: the number of its node, of those that scale it before it is added, and of all nodes below it."""

    number: int
    scaled: Tuple[int, ...]
    below: Set[int]


class Use(NamedTuple):
    """One use of a tied weight: lookup or head, the node that used it, and its number."""

    use: str
    node: str
    number: int


def addends(roots: List[Any]) -> List[Addend]:
    """Of one loss; nothing where it has one alone, or where its graph does not show them."""
    losses = [root for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
    if not losses:
        return []
    nodes = [pair for loss in losses for pair in _split(loss.grad_fn, ())]
    if not 1 < len(nodes) <= ADDENDS:
        return []
    budget = [NODES]
    return [Addend(int(node._sequence_nr()), scaled, _below(node, budget)) for node, scaled in nodes]


def _split(node: Any, scaled: Tuple[int, ...]) -> Iterator[Tuple[Any, Tuple[int, ...]]]:
    children = [child for child, _ in node.next_functions if child is not None]
    name = node.name()
    if SPLIT.match(name) and children:
        for child in children:
            yield from _split(child, ())
    elif len(children) == 1 and (PASSED.match(name) or (SUMMED.match(name) and _gathers(children[0]))):
        yield from _split(children[0], (*scaled, int(node._sequence_nr())))
    elif type(node).__name__ != "AccumulateGrad":
        yield node, scaled


def _gathers(node: Any) -> bool:
    return bool(re.match(r"^(Stack|Cat)Backward", node.name()))


def _below(node: Any, budget: List[int]) -> Set[int]:
    found: Set[int] = set()
    seen, stack = {node}, [node]
    while stack and budget[0] > 0:
        each = stack.pop()
        budget[0] -= 1
        found.add(int(each._sequence_nr()))
        for child, _ in each.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return found


def uses(walk: Walk) -> Dict[int, List[Use]]:
    """id of a tied weight -> its uses."""
    found: Dict[int, List[Use]] = {}
    for key, edges in walk.uses.items():
        if len(edges) > 1:
            found[key] = [_use(walk, node) for node, _ in edges]
    return found


def _use(walk: Walk, node: Any) -> Use:
    consumer = walk.consumer(node)
    number = -1 if consumer is None else int(consumer._sequence_nr())
    return Use(walk.use_name(node).split(" ")[0], "?" if consumer is None else consumer.name(), number)
