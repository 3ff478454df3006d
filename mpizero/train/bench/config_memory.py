"""Compare measured with planned memory and messages of a configuration's model: ``mpizero bench memory CONFIG``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.data import batches
from mpizero.layout.flat import FlatLayout
from mpizero.optim.elementwise import averaging, state_size
from mpizero.sharding import ShardedModelBase
from mpizero.sharding.partition import blocks_of
from mpizero.train.bench.layout_memory import LayoutTable
from mpizero.train.bench.memory_rows import measure_steps, ranks_per_node, table_rows
from mpizero.train.bench.strategy_memory import STRATEGIES
from mpizero.train.config.build import (
    build_model,
    build_optimizer,
    build_sharding,
    build_source,
    lay_out,
    model_and_sample,
    users_modules,
    with_batch,
)
from mpizero.train.config.schema import Config
from mpizero.train.plan import PlanRequest, plan


def measure_config(
    config: Config,
    strategies: Sequence[str] | None,
    shared: Sequence[bool],
    steps: int,
    comm: Communicator,
    tell: Callable[[str], None] = lambda line: None,
) -> list[LayoutTable]:
    """Train a configuration's model with every strategy and kind of memory, and return one table for each, on rank 0.

    Other ranks get an empty list. Collective over ``comm``. On rank 0, ``tell`` is called with a line of text before
    each run. Without ``strategies``, they are all; that of the configuration alone if it splits the model.
    """
    config.parallel.check_ranks(comm.size)
    names = strategies or ((config.parallel.strategy,) if config.parallel.splits_model else STRATEGIES)
    tables = []
    with users_modules(config):
        with all_ranks(comm):
            source, validation = build_source(config)
            config = with_batch(config, source)
        for number, (sharing, strategy) in enumerate(product(shared, names)):
            parallel = replace(config.parallel, strategy=strategy, share_node_memory=sharing)
            run = _ConfigRun(replace(config, parallel=parallel), (source, validation), comm)
            if comm.rank == 0:
                tell(f"{parallel.describe(comm.size)}, {run.memory} memory, {comm.size} ranks")
            if not number:
                run.measure(1)  # libraries, kernels and buffers that every run needs are there before the measurement
            figures = comm.allgather_object(run.measure(steps), "bench")
            with all_ranks(comm):
                if comm.rank == 0:
                    tables.append(run.table(figures))
    return tables


def checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint of a configuration's model: its parameters and the optimizer's arrays.

    Not collective.
    """
    with users_modules(config):
        _, model, _, _ = model_and_sample(config)
    specs = [entry.spec for entry in FlatLayout.build(blocks_of(model)).parameters]
    optimizer = averaging(build_optimizer(config), config.train.ema)
    elements: int = sum(spec.size + state_size(optimizer, spec) for spec in specs)
    return int(elements * np.dtype(model.dtype).itemsize)


class _ConfigRun:
    """Measure one layout of a configuration's model on all ranks of ``comm``; ``sources`` are its samples."""

    def __init__(self, config: Config, sources: tuple[Any, Any], comm: Communicator) -> None:
        self.config, self.sources, self.comm = config, sources, comm

    @property
    def memory(self) -> str:
        return "shared" if self.config.parallel.share_node_memory else "private"

    def measure(self, steps: int) -> dict[str, Any]:
        """Train, and return this rank's figures, those of :func:`measure_steps`. Collective."""
        config, train = self.config, self.config.train

        @contextmanager
        def placed() -> Iterator[ShardedModelBase]:
            with all_ranks(self.comm):
                model = build_model(config, *self.sources)
            with (
                build_sharding(config, self.comm) as sharding,
                lay_out(model, build_optimizer(config), config.parallel, sharding) as sharded,
            ):
                sharded.reserve(train.global_batch)
                yield sharded

        def feed(sharded: ShardedModelBase) -> Iterator[tuple[Any, Any]]:
            return iter(batches(self.sources[0], sharded, train.global_batch, seed=train.seed))

        return measure_steps(self.comm, placed, feed, steps)

    def table(self, figures: Sequence[dict[str, Any]]) -> LayoutTable:
        """Plan the same training, and return measured and planned figures side by side. Not collective."""
        config = self.config
        planned = plan(config, PlanRequest(self.comm.size, ranks_per_node(figures)))
        count, dtype = figures[0]["parameters"], np.dtype(planned.training.model.dtype).name
        grains = planned.training.grains.described(config.train.accumulate)
        training = planned.training
        return LayoutTable(
            memory=self.memory,
            strategy=config.parallel.strategy,
            layout=config.parallel.describe(self.comm.size),
            parameters=count,
            training=(
                f"{config.model.described} with {count:,} {dtype} parameters, {config.optimizer.name}, "
                f"{config.train.global_batch} samples a step in {grains}"
            ),
            not_counted=training.not_counted or ("another library keeps them" if training.unseen else ""),
            rows=table_rows(figures, planned.training),
        )
