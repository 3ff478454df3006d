"""Measure the memory and messages of every strategy in real training steps: ``mpizero bench memory``.

:class:`CacheMeter` counts the bytes that a rank's blocks and loss keep from the forward pass for the backward pass;
:func:`watch` wraps blocks and loss to count them. :func:`measure_memory` trains with each strategy that a
:class:`MemoryRequest` names, and returns a :class:`MemoryRow` for each strategy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from mpizero import nn, optim
from mpizero._util.checks import whole
from mpizero._util.names import nearest
from mpizero._util.settings import check_option
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import available_memory
from mpizero.errors import ConfigError
from mpizero.sharding import ShardingConfig, distribute
from mpizero.sharding.config import placement
from mpizero.sharding.engine import Engine
from mpizero.sharding.pipeline import PipelineRunner
from mpizero.tools.plan.memory import buffers
from mpizero.train.config.sections import STRATEGIES
from mpizero.train.machine import proportional, release_free_memory
from mpizero.types import Array


class CacheMeter:
    """Count the bytes of all arrays that forward passes have kept and backward passes have not freed yet.

    A cache is what a forward pass returns for its backward pass. An array that owns its memory counts once, however
    many caches contain it or views of it.

    Attributes
    ----------
    current, peak : int
        Bytes of the arrays counted now, and the largest number so far.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self._buffers: dict[int, tuple[int, int]] = {}

    def keep(self, cache: object, but: Iterable[object] = ()) -> tuple[Array, ...]:
        """Count from now on the arrays in ``cache``, except those in ``but``; return them, for :meth:`drop`."""
        skipped = {id(array) for value in but for array in buffers(value)}
        counted = tuple(array for array in buffers(cache) if id(array) not in skipped)
        for array in counted:
            uses, size = self._buffers.get(id(array), (0, array.nbytes))
            self._buffers[id(array)] = uses + 1, size
            self.current += 0 if uses else size
        self.peak = max(self.peak, self.current)
        return counted

    def drop(self, arrays: Iterable[Array]) -> None:
        """Stop counting ``arrays``, which :meth:`keep` has returned, except for those that another call of it keeps."""
        for array in arrays:
            uses, size = self._buffers.pop(id(array))
            if uses > 1:
                self._buffers[id(array)] = uses - 1, size
            else:
                self.current -= size


class _CountedCache(NamedTuple):
    """Hold the cache of a block or loss, and the arrays counted in it, so that they stay alive while counted."""

    cache: Any
    arrays: tuple[Array, ...]


class _MeteredLayer:
    """Wrap a layer and count its caches in ``meter``.

    With ``skip_input``, the layer's input is not counted; use it for the first layer, whose input is the samples.
    """

    def __init__(self, layer: Any, meter: CacheMeter, *, skip_input: bool) -> None:
        self.layer, self.meter, self.skip_input = layer, meter, skip_input

    def forward(self, params: Any, x: Any, run: Any) -> tuple[Any, Any]:
        y, cache = self.layer.forward(params, x, run)
        if not run.training:
            return y, cache
        return y, _CountedCache(cache, self.meter.keep(cache, [params, *([x] if self.skip_input else [])]))

    def backward(self, params: Any, cache: _CountedCache, dy: Any, grads: Any) -> Any:
        dx = self.layer.backward(params, cache.cache, dy, grads)
        self.meter.drop(cache.arrays)
        return dx

    def backward_input(self, params: Any, cache: _CountedCache, dy: Any) -> tuple[Any, Any]:
        dx, pending = self.layer.backward_input(params, cache.cache, dy)
        return dx, _CountedCache(pending, self.meter.keep(pending, [params]))

    def backward_weights(self, params: Any, cache: _CountedCache, pending: _CountedCache, grads: Any) -> None:
        self.layer.backward_weights(params, cache.cache, pending.cache, grads)
        self.meter.drop(cache.arrays)
        self.meter.drop(pending.arrays)


class _MeteredLoss:
    """Wrap a loss and count in ``meter`` the arrays that it keeps for its backward pass, except the targets."""

    def __init__(self, loss: Any, meter: CacheMeter) -> None:
        self.loss, self.meter = loss, meter

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        loss, weight, cache = self.loss.forward(prediction, target)
        return loss, weight, _CountedCache(cache, self.meter.keep(cache, [target]))

    def backward(self, cache: _CountedCache, scale: float = 1.0) -> Any:
        gradient = self.loss.backward(cache.cache, scale)
        self.meter.drop(cache.arrays)
        return gradient


def watch(engine: Engine) -> CacheMeter:
    """Wrap the blocks and the loss of this rank's engine, and return a meter that counts their caches in training.

    The meter counts the cache that a forward pass returns, and what ``backward_input`` keeps for
    ``backward_weights``. Parameters, samples and targets are not counted. The wrapped engine computes the same values,
    a little slower, because Python calls every block: none is repeated from a recording (docs/recordings.md). Call this
    function for measurements only.
    """
    meter, runner = CacheMeter(), engine.runner
    holder: Any = runner if isinstance(runner, PipelineRunner) else getattr(runner, "evaluator", None)
    layers: Any = engine.partitioned.local.blocks
    first = engine.partitioned.cuts[0][0]
    for name, layer in layers.items():
        runner.blocks[name] = _MeteredLayer(layer, meter, skip_input=name == first)
    holder.criterion = _MeteredLoss(holder.criterion, meter)
    return meter


#: Number of equal layers of the model, so that the two units that ZeRO-3 gathers at a time are an eighth of it.
STRATEGY_LAYERS = 16
_CLASSES = 8
#: Most bytes per parameter, on one rank alone: value, gradient, two moments, and one partial sum of gradients.
_WORST_STRATEGY_BYTES = 20


@dataclass(frozen=True)
class MemoryRequest:
    """Describe the model, strategies and steps to measure.

    Attributes
    ----------
    parameters : int
        Least number of parameters of the model.
    strategies : tuple of str
        The strategies to measure, in this order.
    shared : tuple of bool
        Whether the ranks of a node share memory. Every value is measured, in this order.
    steps : int
        Number of training steps of each run.
    """

    parameters: int
    strategies: tuple[str, ...]
    shared: tuple[bool, ...]
    steps: int

    @classmethod
    def parse(cls, parameters: float, strategies: str, memory: str, steps: int) -> Self:
        """Check the options of the command line, and return them as a request.

        ``strategies`` are names separated by commas; ``memory`` is "shared", "private" or "both". Not collective.
        """
        if not math.isfinite(parameters) or not 1 <= parameters <= 1e12:
            raise ConfigError(f"--parameters {parameters}: must be from 1 to 1e12")
        names = tuple(name.strip() for name in strategies.split(",") if name.strip())
        for name in names:
            if name not in STRATEGIES:
                hint = nearest(name, STRATEGIES)
                raise ConfigError(f"--strategies {strategies}: {name} is none of {', '.join(STRATEGIES)}{hint}")
        if not names:
            raise ConfigError(f"--strategies {strategies!r}: must name at least one of {', '.join(STRATEGIES)}")
        check_option("--steps", steps, whole(1))
        shared = {"shared": (True,), "private": (False,), "both": (True, False)}[memory]
        return cls(math.ceil(parameters), names, shared, steps)


@dataclass(frozen=True)
class MemoryRow:
    """Hold the measurements of one strategy; numbers of bytes are the largest over the ranks, except ``pss_total``.

    Attributes
    ----------
    memory : str
        "shared" if the ranks of a node share memory, else "private".
    strategy : str
        The strategy's name, as in the configuration.
    ranks, nodes, parameters : int
        Number of ranks, of groups of ranks that share memory, and of parameters.
    formula : int
        Bytes of memory that, by formula, the strategy needs on a rank that computes one grain a step; without the
        buffers into which ZeRO-3 gathers two units.
    counted : int
        Bytes that the library counted at allocation on a rank, without message buffers. Shared windows of a node are
        counted in equal parts on its ranks.
    counted_peak : int
        The largest number of bytes counted at any moment, with message buffers.
    pss : int
        Growth of a rank's proportional set size from before to after the training.
    pss_total : int
        The growth of the proportional set size, summed over all ranks.
    sent_formula, sent : int
        Bytes that a rank sends to other ranks in a step: by formula, and counted.
    """

    memory: str
    strategy: str
    ranks: int
    nodes: int
    parameters: int
    formula: int
    counted: int
    counted_peak: int
    pss: int
    pss_total: int
    sent_formula: int
    sent: int


def wide_mlp(parameters: int) -> nn.MLP:
    """Return a network with :data:`STRATEGY_LAYERS` equal layers and at least ``parameters`` parameters.

    Not collective. The forward pass of a sample takes only two operations per parameter. So a step with one sample
    on each rank takes little more time than reading and writing the memory once.
    """
    width = max(2, math.ceil(math.sqrt(parameters / STRATEGY_LAYERS)))
    return nn.MLP(width, [width] * STRATEGY_LAYERS, _CLASSES, seed=1)


def measure_memory(
    request: MemoryRequest, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> list[MemoryRow]:
    """Train with every requested strategy and kind of memory, and return one row of measurements for each.

    Collective over ``comm``. On rank 0, ``tell`` is called with a line of text before each run.
    """
    model = wide_mlp(request.parameters)
    with all_ranks(comm):
        copies = comm.size if False in request.shared else 2
        require_room(request.parameters, _WORST_STRATEGY_BYTES * request.parameters * copies, comm.size)
    rows = []
    for shared in request.shared:
        for strategy in request.strategies:
            if comm.rank == 0:
                tell(f"{strategy}, {'shared' if shared else 'private'} memory, {comm.size} ranks")
            # Load libraries and kernels, and allocate buffers that every strategy needs, before the measurement.
            _train(wide_mlp(1), comm, strategy, shared, 1)
            rows.append(_train(model, comm, strategy, shared, request.steps))
    return rows


def _train(model: nn.MLP, comm: Communicator, strategy: str, shared: bool, steps: int) -> MemoryRow:
    config = ShardingConfig(comm=comm, micro_batch=1, share_node_memory=shared)
    random = np.random.default_rng(comm.rank)
    x = random.standard_normal((1, model.features)).astype(np.float32)
    y = np.array([comm.rank % _CLASSES])
    before = idle_size(comm)
    with distribute(model, optim.AdamW(lr=1e-4), strategy=strategy, config=config) as sharded:
        for _ in range(steps):
            sharded.train(x, y)
        after = idle_size(comm)
        facts = sharded.metadata()
        every = comm.allgather_object(
            (
                int(sum(facts.formula_bytes.values())),
                # Message buffers are a few megabytes for every model, and not in the formulas.
                sum(size for kind, size in facts.bytes_on_rank.items() if kind != "exchange buffers"),
                facts.peak_bytes,
                after - before,
                facts.bytes_sent_last_step,
            )
        )
    config.close()
    formula, counted, peak, pss, sent = (max(column) for column in zip(*every, strict=True))
    return MemoryRow(
        memory="shared" if shared else "private",
        strategy=strategy,
        ranks=comm.size,
        nodes=facts.nodes,
        parameters=facts.parameter_count,
        formula=formula,
        counted=counted,
        counted_peak=peak,
        pss=pss,
        pss_total=sum(entry[3] for entry in every),
        sent_formula=sent_formula(strategy, facts.parameter_count, facts.nodes, facts.ranks_per_node),
        sent=sent,
    )


def sent_formula(strategy: str, parameters: int, groups: int, ranks_per_group: int) -> int:
    """Return the bytes that a rank sends in a step with float32 parameters and one grain on each rank.

    Not collective. There are ``groups`` groups of ranks that share memory, with ``ranks_per_group`` ranks each. A rank
    exchanges messages with its peers in the other groups: it reduces its part of the gradients, and sends its part of
    the parameters, with ZeRO-3 twice: before the forward and before the backward pass.
    """
    times = 3 if placement(strategy).shard_parameters else 2
    return round(4 * times * parameters * (groups - 1) / groups / ranks_per_group)


def idle_size(comm: Communicator) -> int:
    """Return this rank's proportional set size, in bytes, while no rank allocates or frees memory.

    Collective over ``comm``.
    """
    release_free_memory()
    comm.barrier("bench memory")
    size = proportional()
    comm.barrier("bench memory")
    return size


def require_room(size: int, needed: int, ranks: int, option: str = "--parameters") -> None:
    """Raise :class:`ConfigError` if a measurement on ``ranks`` ranks needs more memory than is free on this node.

    Not collective. ``needed`` is in bytes. The message names the command line ``option`` and its value ``size``.
    """
    free = available_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"{option} {size}: {ranks} ranks may need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; "
            f"give fewer {option.removeprefix('--')} or ranks{', or --memory shared' * (option == '--parameters')}"
        )


def strategies_table(rows: Sequence[MemoryRow]) -> str:
    """Return the results as a table for people, in MB (10^6 bytes).

    Not collective.
    """
    first = rows[0]
    lines = [
        f"{first.parameters:,} float32 parameters, AdamW, one grain a rank, {first.ranks} ranks; MB a rank",
        f"{'memory':8}{'strategy':9}{'formula':>9}{'counted':>9}{'peak':>9}{'PSS':>9}{'PSS all':>9}"
        f"{'sent':>9}{'formula':>9}",
    ]
    for row in rows:
        sizes = (row.formula, row.counted, row.counted_peak, row.pss, row.pss_total, row.sent, row.sent_formula)
        lines.append(f"{row.memory:8}{row.strategy:9}" + "".join(f"{value / 1e6:9.1f}" for value in sizes))
    return "\n".join(lines)


def strategies_json(rows: Sequence[MemoryRow]) -> str:
    """Return the results as JSON, for programs.

    Not collective.
    """
    return json.dumps({"benchmark": "memory", "rows": [asdict(row) for row in rows]})
