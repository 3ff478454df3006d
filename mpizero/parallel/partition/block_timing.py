"""Measure the time of each block of a model, to cut it into stages of equal time."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import map_leaves
from mpizero.comm.agreement import all_ranks, record_call
from mpizero.errors import ConfigError
from mpizero.layout.flat import joined, nested
from mpizero.nn.arrays import StartValues, start_values_of
from mpizero.nn.layer import fresh_integers
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.types import Array, BlockModel, ParameterSpec, Run


class BlockTimes(NamedTuple):
    """Hold the seconds that one block takes for one micro-batch.

    They are the times of its forward pass, and of its backward pass for its input and for its weights.
    """

    forward: float
    backward_input: float
    backward_weights: float


def measure_blocks(model: BlockModel, x: Array, y: Array, repeats: int = 3) -> dict[str, BlockTimes]:
    """Run every block on one micro-batch, several times, and return the shortest times by block. Not collective.

    Only one block's parameters, with their initial values, are in memory at a time. The times of the last block include
    the loss.

    Parameters
    ----------
    model : BlockModel
        The whole model.
    x, y : array
        Samples and targets of a micro-batch, of the shapes and types that are used in training.
    repeats : int
        Number of runs of each block; at least 2 are made, because the first one also warms up caches.

    Raises
    ------
    ConfigError
        If ``model`` is a black box.
    """
    if not isinstance(model, BlockModel):
        raise ConfigError(
            f"{type(model).__name__} is a black box: only models of blocks can be measured block by block"
        )
    specs, run = blocks_of(model), Run(training=True, seed=model.seed)
    homes = {joined(block, spec.name): spec for block in specs for spec in specs[block]}
    found: dict[str, BlockTimes] = {}
    fill = start_values_of(model)
    value: Any = x
    last = list(model.blocks)[-1]
    for name, layer in model.blocks.items():
        params, grads = _parameters(model, name, specs[name], homes, fill)
        times = []
        for _ in range(max(2, repeats)):
            started = perf_counter()
            out, cache = layer.forward(params, value, run)
            if name == last:
                _, _, loss_cache = model.loss.forward(out, y)
            forward = perf_counter()
            d = model.loss.backward(loss_cache) if name == last else map_leaves(_gradient_like, out)
            begun = forward if name == last else perf_counter()
            _, pending = layer.backward_input(params, cache, d)
            halfway = perf_counter()
            layer.backward_weights(params, cache, pending, grads)
            times.append(BlockTimes(forward - started, halfway - begun, perf_counter() - halfway))
        found[name] = BlockTimes(*(min(column) for column in zip(*times, strict=True)))
        value = out
    return found


def _gradient_like(array: Array) -> Array | None:
    """Return ones of the shape of ``array``; None for whole numbers, which have no gradient."""
    return np.ones_like(array) if array.dtype.kind in "fc" else None


def measured_costs(model: BlockModel, x: Array, y: Array, config: ShardingConfig, repeats: int = 3) -> list[float]:
    """Measure the seconds that each block takes, forward plus backward, for ``costs`` of a model in pipeline stages.

    Collective over ``config.comm``. Rank 0 measures as :func:`measure_blocks` does, and every rank returns its times in
    the order of the blocks, so that all ranks cut the model at the same blocks.

    Parameters
    ----------
    model, x, y, repeats
        As in :func:`measure_blocks`.
    config : ShardingConfig
        The ranks.

    Returns
    -------
    list of float
        Seconds, by block.

    Raises
    ------
    ConfigError
        On all ranks, if ``model`` is a black box.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     costs = mz.measured_costs(mz.nn.MLP(2, [4], 2), np.eye(2, dtype=np.float32), np.array([0, 1]), config)
    >>> len(costs), min(costs) > 0.0  # one a block, for HybridShardedModel(..., costs=costs)
    (2, True)
    """
    comm = config.communicator
    costs: list[float] = []
    record_call(comm, "measured_costs")
    with all_ranks(comm, first=True):
        if comm.rank == 0:
            costs = [sum(times) for times in measure_blocks(model, x, y, repeats).values()]
    result: list[float] = comm.broadcast_object(costs, 0, "measured costs")
    return result


def _parameters(
    model: BlockModel, block: str, specs: tuple[ParameterSpec, ...], homes: dict[str, ParameterSpec], fill: StartValues
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Allocate a block's parameters, with their initial values, and its gradients, uninitialized; return both by name.

    ``specs`` are the block's parameters. ``homes`` holds, by full name, the parameters that tied ones share.
    ``fill`` writes start values.
    """
    params, grads = {}, {}
    for spec in specs:
        name = spec.tied or joined(block, spec.name)
        flat = np.empty(spec.size, model.dtype)
        fill(_named(homes[name], name), 0, spec.size, flat)
        params[spec.name], grads[spec.name] = spec.view(flat), spec.view(np.empty_like(flat))
    integers = fresh_integers(model.blocks[block])
    return nested(params | integers), nested(grads | integers)


def _named(spec: ParameterSpec, name: str) -> ParameterSpec:
    return ParameterSpec(name, spec.shape, spec.init, complex=spec.complex)
