"""Move a model to memory that ranks do not share, if its first step does not find enough shared memory."""

from __future__ import annotations

import numpy as np

from mpizero.errors import SharedMemoryError
from mpizero.parallel.engine import Engine
from mpizero.parallel.memory_check import tell_private
from mpizero.parallel.partition.parallel_layout import ParallelLayout


def check_movable(engine: Engine, error: SharedMemoryError) -> None:
    """Check that :func:`in_private_memory` can move everything that ``engine`` holds.

    Collective over all ranks, all of which have raised ``error``.

    Raises
    ------
    SharedMemoryError
        If the optimizer has made a step or loaded a state, or compression has residuals. These cannot be moved, because
        the ranks of a node share one copy of them.
    """
    updater = engine.updater
    used = np.array([(updater is not None and not updater.fresh) or engine.exchange.owes], np.int8)
    engine.grid.world.allreduce(used, "max", "private memory")
    if used[0]:
        raise SharedMemoryError(
            f"{error}; or call reserve(global_batch) once, before the first step and before a checkpoint is loaded: "
            "then every rank keeps its own copy where memory is short. Parameters and state are unchanged"
        ) from error


def in_private_memory(engine: Engine, parallel_layout: ParallelLayout | None, error: SharedMemoryError) -> Engine:
    """Close ``engine``, and return a new engine in which every rank keeps its own copy of the model.

    Collective over all ranks, all of which have raised ``error`` and passed :func:`check_movable`. Parameters, integer
    arrays, step number and loss scale are copied. The optimizer is bound to the new engine.
    """
    updater, units = engine.updater, engine.layout.units
    values, version = [engine.store.owned(unit.index).copy() for unit in units], engine.store.version
    engine.close()
    tell_private(engine.grid.world, str(error))
    made = Engine(engine.model, engine.config, engine.placement, parallel_layout, private=True)
    for unit, kept in zip(units, values, strict=True):
        made.store.owned(unit.index)[:] = kept
    made.integers.copy_from(engine.integers)
    made.store.publish()
    made.store.version = version
    made.step_number, made.grain_rule = engine.step_number, engine.grain_rule
    if updater is not None:
        made.bind(updater.optimizer)
        made.exchange.compress(engine.exchange.compression)
        assert made.updater is not None
        made.updater.watch = updater.watch
    made.scalars.watch, made.loss_scale = engine.scalars.watch, engine.loss_scale
    return made
