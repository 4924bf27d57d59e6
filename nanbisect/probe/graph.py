"""The walk over a loss's graph: every leaf that will receive a gradient, every use of it, every kernel.

Entered once at each backward call. It finds plain parameters, LoRA's, DDP's and FSDP's own leaves
without knowing any of them, and costs about a microsecond a node.
"""

from __future__ import annotations

import re

KERNEL = re.compile(r"[Aa]ttention|FlashAttn|^(Safe)?Softmax")
VIEWS = re.compile(r"^(T|Transpose|View|UnsafeView|Reshape|AsStrided|ToCopy|Permute|Expand|Alias|Slice)Backward")
LOOKUP = re.compile(r"^Embedding")


class Walk:
    """What the graph below some roots holds.

    `leaves`: id -> tensor. `uses`: id -> list of (node, input index): the edges into the leaf.
    `kernels`: name of an attention or softmax node -> count.
    """

    def __init__(self, roots):
        self.leaves = {}
        self.uses = {}
        self.kernels = {}
        self.parents = {}
        self._walk([root.grad_fn for root in roots if root.grad_fn is not None])

    def _walk(self, stack):
        seen = set(stack)
        while stack:
            node = stack.pop()
            name = node.name()
            if KERNEL.search(name):
                self.kernels[name] = self.kernels.get(name, 0) + 1
            for index, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                variable = getattr(child, "variable", None)
                if variable is not None:
                    self._leaf(variable, node, index)
                elif child not in seen:
                    seen.add(child)
                    self.parents[child] = node
                    stack.append(child)

    def _leaf(self, variable, node, index):
        self.leaves[id(variable)] = variable
        self.uses.setdefault(id(variable), []).append((node, index))

    def use_name(self, node):
        """lookup or head, with the first consumer that is neither a view nor a cast."""
        while node is not None and VIEWS.match(node.name()):
            node = self.parents.get(node)
        name = node.name() if node is not None else "?"
        return "%s (%s)" % ("lookup" if LOOKUP.match(name) else "head", name)
