"""Make named views of flat gradient buffers, and add up the micro-batches of a grain in such buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpizero._util.pytree import map_leaves
from mpizero.layout.flat import FlatLayout, Unit, united, views
from mpizero.parallel.gradients.unwritten_gradients import GradientDict
from mpizero.parallel.parameters.allocator import Allocator
from mpizero.parallel.parameters.integer_state import IntegerState
from mpizero.types import Array


class GradientViews:
    """Make named views of gradient buffers, beside the arrays that new values of integer arrays are written to.

    A frozen parameter's gradient is a view of memory that is never read.
    """

    def __init__(self, layout: FlatLayout, memory: Allocator, dtype: Any, integers: IntegerState) -> None:
        self.integers = integers
        self.unread = memory.private("buffers", layout.largest_frozen, dtype)

    def unit(self, unit: Unit, buffer: Array, *, by_block: bool = False) -> dict[str, Any]:
        """Return nested views, by block and parameter, of the gradients of ``unit``, which ``buffer`` holds.

        With ``by_block``, the buffer holds the gradients of one block at a time, as :func:`block_parts` finds them.
        """
        result = {}
        for block in unit.blocks:
            entries = [entry for entry in unit.entries if entry.block == block]
            held = sorted((e for e in entries if e.gradient >= 0), key=lambda entry: entry.gradient)
            starts = accumulate([0, *(e.spec.size for e in held)]) if by_block else (e.gradient for e in held)
            tree = views(buffer, [(e.local_name, start, e.spec) for e, start in zip(held, starts, strict=False)])
            frozen = views(self.unread, [(e.local_name, 0, e.spec) for e in entries if e.gradient < 0])
            result[block] = GradientDict(united(united(tree, frozen), self.integers.targets(block)))
        return result


def block_parts(unit: Unit, block: str, buffer: Array) -> list[Array]:
    """Return the parts of ``buffer``, which holds the gradients of one block, for each of the block's ranges.

    They follow one another in the order of ``unit.gradient_ranges``. Not collective.
    """
    sizes = [span.size for span in unit.gradient_ranges[block]]
    return [buffer[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def apart(value: Any, parts: Sequence[Array]) -> Any:
    """Return ``value``, an array or a tree of arrays, with copies of the arrays that share memory with ``parts``.

    Not collective.
    """

    def own(leaf: Any) -> Any:
        shared = isinstance(leaf, np.ndarray) and any(np.may_share_memory(leaf, part) for part in parts)
        return leaf.copy() if shared else leaf

    return map_leaves(own, value)


def largest_block(layout: FlatLayout) -> int:
    """Return the number of gradient elements of the block that has the most of them. Not collective."""
    blocks = [ranges for unit in layout.units for ranges in unit.gradient_ranges.values()]
    return max((sum(span.size for span in ranges) for ranges in blocks), default=0)


class MicroBatchSum:
    """Add the gradients of a grain's micro-batches, in their order, in a buffer of ``size`` elements.

    The buffer is allocated when it is first needed; with ``accumulate`` 1, one micro-batch in a grain, it never is.
    """

    def __init__(self, memory: Allocator, size: int, dtype: Any, accumulate: int) -> None:
        self.memory, self.size, self.dtype = memory, size if accumulate > 1 else 0, dtype
        self.partial: Array = np.empty(0, dtype)

    def add(self, target: Array, base: int, number: int) -> None:
        """Add ``target``, a gradient of micro-batch ``number``, to the buffer's elements from ``base`` on.

        Micro-batch 0 overwrites these elements.
        """
        if not self.size:
            return
        if not self.partial.size:
            self.partial = self.memory.private("gradients", self.size, self.dtype)
        partial = self.partial[base : base + target.size]
        if number == 0:
            partial[:] = target
        else:
            partial += target

    def finish(self, target: Array, base: int) -> None:
        """Copy the sum, in the buffer's elements from ``base`` on, to ``target``."""
        if self.partial.size:
            target[:] = self.partial[base : base + target.size]
