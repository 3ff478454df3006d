"""Count the work of a forward and backward pass from what JAX lowers, before XLA compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpizero.adapters.jax.compiled_loss import CompiledLoss
from mpizero.adapters.jax.jax_block import JaxBlock
from mpizero.adapters.jax.parameter_tree import samples
from mpizero.adapters.pass_work import PassWork, efficient_samples
from mpizero.types import Array

#: Work of a forward and backward pass over that of the forward pass.
_BOTH = 3


def enough_samples_of_loss(loss: CompiledLoss, parameters: Mapping[str, Array], x: Any, y: Any) -> int | None:
    """Return with how many samples a grain's fixed cost is small; None if the loss cannot be traced. Not collective.

    Of ``x`` and ``y``, trees of samples, only shapes and types count.
    """

    def work(count: int) -> PassWork:
        return _work(loss.lowered(parameters, *_zeros((x, y), count)))

    return efficient_samples(work, sum(array.size for array in parameters.values()))


def enough_samples_of_blocks(blocks: Mapping[str, JaxBlock], dtype: np.dtype[Any], x: Any) -> int | None:
    """Return the same for a model of blocks, whose parameters have type ``dtype``. Not collective."""

    def work(count: int) -> PassWork:
        given, found = _zeros(samples(x, dtype, "x"), count), PassWork()
        for block in blocks.values():
            kinds = (dtype, np.result_type(dtype, np.complex64))
            shapes = [jax.ShapeDtypeStruct(spec.shape, kinds[spec.complex]) for spec in block.parameters]
            lowered = block.compiled.lowered(shapes, given)
            found = found.plus(PassWork(*(_BOTH * number for number in _work(lowered))))
            given = jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
        return found

    return efficient_samples(work, sum(int(spec.size) for block in blocks.values() for spec in block.parameters))


def _zeros(tree: Any, count: int) -> Any:
    return jax.tree_util.tree_map(lambda leaf: np.zeros((count, *leaf.shape[1:]), leaf.dtype), tree)


def _work(lowered: Any) -> PassWork:
    """Return the work of what JAX has lowered. The calls of its kernels take little: XLA joins them."""
    found = lowered.cost_analysis()
    return PassWork(operations=int(found.get("flops", 0)), bytes=int(found.get("bytes accessed", 0)))
