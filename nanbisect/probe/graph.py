"""The walk over a loss's graph: every leaf that will receive a gradient, every use of it, every kernel.

Entered once at each backward call. It finds plain parameters, LoRA's, DDP's and FSDP's own leaves
without knowing any of them, and costs about a microsecond a node.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any, Iterable, NamedTuple

import torch

KERNEL = re.compile(r"[Aa]ttention|FlashAttn|^(Safe)?Softmax")
VIEWS = re.compile(r"^(T|Transpose|View|UnsafeView|Reshape|AsStrided|ToCopy|Permute|Expand|Alias|Slice)Backward")
UNNAMED = "CppFunction"  # the class of nodes from other libraries' C++, which have a name but no class of their own
LOOKUP = re.compile(r"^Embedding")
CAST = re.compile(r"^ToCopyBackward")
PLAIN = re.compile(r"Backward\d+$|^torch::autograd::|^CheckpointFunctionBackward$")  # torch's own, or seen by itself


class About(NamedTuple):
    """What a node's name says."""

    kernel: bool
    cast: bool
    plain: bool


@functools.lru_cache(maxsize=1024)
def about(name: str) -> About:
    """There are few names and many nodes."""
    return About(bool(KERNEL.search(name)), bool(CAST.match(name)), bool(PLAIN.search(name)))


Node = Any  # torch.autograd.graph.Node; its stubs lack half of what is used here


class Walk:
    """What the graph below some roots (tensors or gradient edges) holds.

    `leaves`: id -> tensor. `uses`: id -> list of (node, input index): the edges into the leaf.
    `kernels`: name of an attention or softmax node -> count. `casts`: changes of dtype, or None where a
    compiled or hand-written node may hide some.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        self.uses: dict[int, list[tuple[Node, int]]] = {}
        self.kernels: dict[str, int] = {}
        self.casts: int | None = 0
        self.parents: dict[Node, Node | None] = {}  # every node -> one that it was found from
        self._walk([node for node in map(self._entry, roots) if node is not None])
        self._count_kinds()

    def _entry(self, root: Any) -> Node | None:
        """The node where the walk starts; a root that is a leaf itself has none, nor has a constant."""
        if not isinstance(root, torch.Tensor):
            return getattr(root, "node", None)
        if root.grad_fn is None and root.requires_grad:
            self.leaves[id(root)] = root
        return root.grad_fn

    def _walk(self, stack: list[Node]) -> None:
        parents = self.parents
        parents.update(dict.fromkeys(stack))
        stack = list(parents)  # each root once
        while stack:
            node = stack.pop()
            for index, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                if type(child).__name__ == "AccumulateGrad":  # a user's Function may have a `variable` of its own
                    self._leaf(child.variable, node, index)
                elif child not in parents:
                    parents[child] = node
                    stack.append(child)

    def _count_kinds(self) -> None:
        """Nodes by their names, which are slow to ask for: once a class, where a class has one name."""
        samples: dict[type[Any], Any] = {type(node): node for node in self.parents}
        counts: Counter[str] = Counter()
        for kind, count in Counter(type(node) for node in self.parents).items():
            if kind.__name__ != UNNAMED:
                counts[samples[kind].name()] += count
            else:
                counts.update(node.name() for node in self.parents if type(node) is kind)
        for name, count in counts.items():
            self._count(name, count)

    def _count(self, name: str, times: int) -> None:
        known = about(name)
        if known.kernel:
            self.kernels[name] = times
        if not known.plain:
            self.casts = None
        elif known.cast and self.casts is not None:
            self.casts += times

    def _leaf(self, variable: torch.Tensor, node: Node, index: int) -> None:
        self.leaves[id(variable)] = variable
        self.uses.setdefault(id(variable), []).append((node, index))

    def results(self) -> set[int]:
        """Sequence numbers of all nodes: what a forward returned is known by its own."""
        return {node._sequence_nr() for node in self.parents}

    def consumer(self, node: Node | None) -> Node | None:
        """The first node from here on that is neither a view nor a cast."""
        while node is not None and VIEWS.match(node.name()):
            node = self.parents.get(node)
        return node

    def use_name(self, node: Node | None) -> str:
        """lookup or head, with the first consumer that is neither a view nor a cast."""
        node = self.consumer(node)
        name = node.name() if node is not None else "?"
        return "%s (%s)" % ("lookup" if LOOKUP.match(name) else "head", name)
