"""Run the micro-batches of a step through the stages of a pipeline, in the order of a schedule.

:func:`make_runner` chooses the runner and the evaluator of a rank: :class:`PipelineRunner` for a pipeline stage, or
those of ``sharding/forward_backward.py`` for a whole model of blocks or a functional model. :func:`measured_costs`
measures the time of each block, so that a model can be cut into stages of equal time.

[Note: pipeline bits] Every chunk runs both the forward and the backward passes of its micro-batches in ascending order.
Gradients are added by the same code and in the same order as in a model that is not split. So neither the number of
stages nor the schedule changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.checks import loss_and_weight
from mpizero._util.pytree import as_arrays, leaves_of, map_leaves
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import all_ranks, record_call
from mpizero.comm.p2p import Route, broadcast_tree, key_of, packable
from mpizero.errors import CollectiveError, ConfigError, LayoutError, PeerFailure
from mpizero.guard import guard
from mpizero.kernels import to_host
from mpizero.layout import Instruction, Schedule, build_schedule
from mpizero.layout.flat import by_global_name, joined, nested
from mpizero.nn.arrays import StartValues, start_values_of
from mpizero.nn.layer import call_located, fresh_integers
from mpizero.nn.recorded import RecordedBlocks
from mpizero.sharding.batch import GrainScalars
from mpizero.sharding.config import ShardingConfig
from mpizero.sharding.device import ComputeDevice
from mpizero.sharding.forward_backward import (
    BlackBoxEvaluator,
    BlockEvaluator,
    CheckedMicroBatch,
    Runner,
    RunOf,
    SequentialRunner,
    agreeable_errors,
    replaced_criterion,
    with_next,
)
from mpizero.sharding.grad_reduce import MicroBatch
from mpizero.sharding.integrity import check_function, check_layers
from mpizero.sharding.mesh import Mesh
from mpizero.sharding.params import ParameterProvider, ParameterStore
from mpizero.sharding.partition import PartitionedModel, blocks_of
from mpizero.types import EVALUATE, Array, BlockModel, ParameterSpec, Run


def make_runner(
    partitioned: PartitionedModel,
    grid: ProcessGrid,
    store: ParameterStore,
    scalars: GrainScalars,
    device: ComputeDevice,
    loss_scale: Callable[[], float],
) -> Runner:
    """Create this rank's runner, for a pipeline stage, a model of blocks or a functional model. Not collective.

    ``loss_scale`` returns the current loss scale.
    """
    kinds: Any = {
        "counts": grid.coordinates.tensor == 0,  # tensor ranks find the same losses
        "agreeable": agreeable_errors(grid),
        "compute_device": device,
    }
    always = "gradients" in guard.current().debug
    if not isinstance(partitioned.local, BlockModel):
        box = BlackBoxEvaluator(partitioned.local, store)
        if box.in_place:
            kinds["sentinels"] = check_function(partitioned.local.loss_and_grad, scalars.frozen, always=always)
        return SequentialRunner(box, partitioned, scalars, **kinds)
    kinds["sentinels"] = check_layers(partitioned.local.blocks, scalars.frozen, always=always)
    provider = device.parameter_provider(store)
    if grid.pipeline.size > 1:
        return PipelineRunner(grid.pipeline, loss_scale, partitioned, provider, scalars, **kinds)
    split: Any = {"run_on": partitioned.run_on} if partitioned.is_split else {}
    evaluator = BlockEvaluator(partitioned.local, provider, loss_scale, agreeable=kinds["agreeable"], **split)
    return SequentialRunner(evaluator, partitioned, scalars, **kinds)


#: Number of instructions, the current one included, whose receives are posted early.
AHEAD = 4
_BACKWARD_KINDS = ("backward", "backward_input")


@dataclass
class _Flight:
    """Hold the data of one micro-batch on a chunk, from its forward pass to the end of its backward pass.

    If a layer raises, ``fail`` is called with the error, ``failed`` is set, and nothing more is computed from the
    micro-batch. Its messages are still sent and received, so that no rank waits for this one. ``caches`` holds what
    each block's forward pass returned for its backward pass. ``pending`` holds what each block's ``backward_input``
    returned for its ``backward_weights``. ``loss`` holds what the forward pass of the loss returned for its backward
    pass.
    """

    fail: Callable[[Exception], None]
    failed: bool = False
    caches: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)
    loss: Any = None


class PipelineRunner(Runner):
    """Execute the instructions of a pipeline schedule for this rank's stage.

    ``comm`` has the ranks of this pipeline; rank i is stage i. ``loss_scale`` returns the current loss scale. The other
    parameters are :class:`~mpizero.sharding.forward_backward.Runner`'s.
    """

    def __init__(
        self,
        comm: Communicator,
        loss_scale: Callable[[], float],
        partitioned: PartitionedModel,
        store: ParameterProvider,
        scalars: GrainScalars,
        **settings: Any,
    ) -> None:
        super().__init__(partitioned, store, scalars, **settings)
        self.comm, self.loss_scale, self.criterion = comm, loss_scale, partitioned.local.loss
        self.blocks = RecordedBlocks(partitioned.local.blocks, partitioned.local.loss)
        self.pipeline_p2p = self.compute_device.pipeline_p2p(comm)
        store.progress.register("pipeline", self.pipeline_p2p.progress)
        self.stage_of = partitioned.parallel_layout.chunks
        self.units = {chunk: self.store.layout.units_of(partitioned.cuts[chunk]) for chunk in partitioned.chunks}
        self.most_caches = 0
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._predicted = 0

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the pipeline schedule for a number of micro-batches. Not collective."""
        axes = self.partitioned.parallel_layout
        return build_schedule(axes.schedule, axes.pipeline, micro_batches, axes.virtual_stages)

    # ------------------------------------------------------------------ a step

    def run(self, micro_batches: Iterable[MicroBatch], run_of: RunOf) -> None:
        """Run the passes of all micro-batches in the order of the schedule; see :meth:`.Runner.run`."""
        batches, self._flights = list(micro_batches), {}
        self.ready()  # stages wait for each other in ways that ranks of a node must not
        checked = [CheckedMicroBatch(batch, self) for batch in batches]
        if not batches:
            return
        # Padding of the schedule is no micro-batch of any replica: its instructions are left out on every stage.
        program = [i for i in self.schedule(len(batches)).programs[self.partitioned.stage] if i.micro < len(batches)]
        for position, instruction in enumerate(program):
            for ahead in program[position : position + AHEAD]:
                self._post(ahead, batches)
            begun = self.store.timeline.begin()
            self._execute(instruction, checked[instruction.micro], run_of)
            self.store.timeline.end("schedule", instruction, begun)
            self.store.progress.poll()
        self.pipeline_p2p.finish()
        self.end_sentinels()

    def _execute(self, instruction: Instruction, checked: CheckedMicroBatch, run_of: RunOf) -> None:
        if checked.batch.grain is None:
            self._absent(instruction, checked)
        elif instruction.kind == "forward":
            self._forward(instruction.chunk, instruction.micro, checked, run_of)
        else:
            self._backward(instruction, checked)

    def _absent(self, instruction: Instruction, checked: CheckedMicroBatch) -> None:
        """Join the collectives of ``instruction``, a pass of a micro-batch that only other replicas have."""
        forward = instruction.kind == "forward"
        units = self.units[instruction.chunk]
        for unit, following in with_next(units if forward else reversed(units)):
            with self.store.unshard(unit, following):
                pass
            if instruction.kind not in ("forward", "backward_input"):
                checked.reduce(unit)

    def _forward(self, chunk: int, micro: int, checked: CheckedMicroBatch, run_of: RunOf) -> None:
        (x, y, _), run = checked.batch.samples, run_of(*checked.batch.sample_range)
        flight = self._flights[chunk, micro] = _Flight(self.scalars.fail)
        self.most_caches = max(self.most_caches, len(self._flights))
        value = self._pass_forward(chunk, micro, x, self.partitioned.run_on(x, run), flight)
        if chunk == len(self.stage_of) - 1:
            with self._computing(flight) as working:
                if working:
                    with self.store.timeline.span("forward", "loss"):
                        if self.criterion is not self.partitioned.local.loss:
                            value = self.blocks.released(value)  # a loss of the user's may keep it
                        loss, weight, flight.loss = self.criterion.forward(value, y)
                        loss, weight = loss_and_weight(self.criterion.forward, loss, weight, run)
                    self.count(checked.batch, loss, weight)

    def _pass_forward(self, chunk: int, micro: int, x: Any, run: Run, flight: _Flight) -> Any:
        """Receive a chunk's input, run the chunk forward, send its output to the next chunk, and return the output.

        Return None if a layer of this or of an earlier chunk has raised. ``x`` holds the samples of the micro-batch;
        the first chunk takes them as its input.
        """
        value = x
        if chunk > 0:
            value = self.pipeline_p2p.receive(Route("forward", chunk), micro, key_of(x), self.stage_of[chunk - 1])
            flight.failed = value is None
        for unit, following in with_next(self.units[chunk]):
            with self.store.unshard(unit, following) as params, self._computing(flight) as working:
                for block in unit.blocks if working else ():
                    value, cache = self._call(block, "forward", params[block], value, run)
                    if run.training:
                        flight.caches[block] = cache
        if chunk < len(self.stage_of) - 1:
            self._send(Route("forward", chunk + 1), micro, x, self.stage_of[chunk + 1], value, flight)
        return None if flight.failed else value

    def _send(self, route: Route, micro: int, x: Any, peer: int, value: Any, flight: _Flight) -> None:
        """Send ``value``, which a chunk has computed from the samples ``x``, to stage ``peer``.

        ``route`` says which chunk receives it, and in which pass. If computing ``value`` has failed, a message that
        says so is sent instead.
        """
        with self._computing(flight) as working:
            if working:
                if route.kind == "forward":
                    what, block = "forward", self.partitioned.cuts[route.border - 1][-1]
                else:
                    what, block = "the backward pass", self.partitioned.cuts[route.border + 1][0]
                what = f"what {what} of block {block!r} returns"
                self.pipeline_p2p.check(route, key_of(x), value, what)
        sent = None if flight.failed else self.blocks.released(value)  # the message may leave later
        self.pipeline_p2p.send(route, micro, key_of(x), peer, sent)

    def _backward(self, instruction: Instruction, checked: CheckedMicroBatch) -> None:
        """Compute the gradients of a chunk's input, weights or both from the gradient of its output, unit by unit.

        The gradient of the output is received from the next chunk, the gradient of the input is sent to the previous
        chunk. The last chunk starts from the gradient of the loss.
        """
        kind, chunk, micro = instruction.kind, instruction.chunk, instruction.micro
        flight, weights = self._flights[chunk, micro], kind != "backward_input"
        d = self._begin_backward(chunk, micro, checked, flight) if kind in _BACKWARD_KINDS else None
        for unit, following in with_next(reversed(self.units[chunk])):
            with self.store.unshard(unit, following) as params, self._computing(flight) as working:
                grads = checked.views(unit) if working and weights else {}
                for block in reversed(unit.blocks) if working else ():
                    d = self._block_backward(kind, block, params[block], d, grads.get(block), flight)
                    if kind == "backward" and checked.by_block:
                        d = checked.accumulate(unit, block, d)
            if weights:
                checked.reduce(unit)
        if kind in _BACKWARD_KINDS:
            self._send_back(chunk, micro, checked, d)
        if weights:
            del self._flights[chunk, micro]

    def _block_backward(self, kind: str, block: str, params: Any, d: Any, grads: Any, flight: _Flight) -> Any:
        """Call a method of a block's layer: ``kind`` is "backward", "backward_input" or "backward_weights".

        ``d`` is the gradient of the layer's output, and ``grads`` are the views for the gradients of its parameters.
        Return the gradient of the layer's input, if the method computes it.
        """
        if kind == "backward":
            return self._call(block, kind, params, flight.caches.pop(block), d, grads)
        if kind == "backward_input":
            d, flight.pending[block] = self._call(block, kind, params, flight.caches[block], d)
            return d
        return self._call(block, kind, params, flight.caches.pop(block), flight.pending.pop(block), grads)

    def _call(self, block: str, method: str, *args: Any) -> Any:
        """Call ``method`` of a block's layer with ``args``, record its time, and return its result."""
        clock, bound = self.store.timeline, getattr(self.blocks[block], method)
        begun = clock.begin()
        result = call_located("block", block, bound, *args)
        clock.end("forward" if method == "forward" else "backward", block, begun)
        self.store.progress.poll()
        return result

    def _begin_backward(self, chunk: int, micro: int, checked: CheckedMicroBatch, flight: _Flight) -> Any:
        d = None
        if chunk < len(self.stage_of) - 1:
            key = key_of(checked.batch.samples[0])
            d = self.pipeline_p2p.receive(Route("backward", chunk), micro, key, self.stage_of[chunk + 1])
            flight.failed = flight.failed or d is None
            return d
        with self._computing(flight) as working:
            if working:
                with self.store.timeline.span("backward", "loss"):
                    d = self.criterion.backward(flight.loss, self.loss_scale())
        flight.loss = None
        return d

    def _send_back(self, chunk: int, micro: int, checked: CheckedMicroBatch, d: Any) -> None:
        if chunk == 0:
            return
        flight, x = self._flights[chunk, micro], checked.batch.samples[0]
        with self._computing(flight) as working:
            if working and not leaves_of(d):
                first, before = self.partitioned.cuts[chunk][0], self.partitioned.cuts[chunk - 1][-1]
                raise LayoutError(
                    f"no gradient reaches block {before!r}: {first!r} after it returns none for its input"
                )
        self._send(Route("backward", chunk - 1), micro, x, self.stage_of[chunk - 1], d, flight)

    @contextmanager
    def _computing(self, flight: _Flight) -> Iterator[bool]:
        """Yield whether to compute: False if an error has occurred in this micro-batch on this or another rank.

        An error that a layer raises inside the context is caught and recorded, so that this rank goes on to join the
        later collectives. Errors of types that are not in ``agreeable`` are raised.
        """
        try:
            yield not flight.failed
        except Exception as error:
            if isinstance(error, CollectiveError | PeerFailure) or not isinstance(error, self.agreeable):
                raise
            flight.fail(error)
            flight.failed = True
            flight.caches.clear()

    # ------------------------------------------------------------------ forward alone

    def predict(self, x: Any) -> Any:
        """Return the model's prediction for this rank's ``x``, on every stage; None if ``x`` is None.

        Collective over the pipeline, and over the data group if parameters are sharded. A layer's error is raised on
        all stages.
        """
        errors: list[Exception] = []
        local = None if x is None else self.compute_device.put(self.partitioned.local_positions(as_arrays(x)))
        value = self._forward_only(local, EVALUATE, errors.append)
        form, joined = None, None
        with all_ranks(self.comm, "predict"):  # so everything that was sent has arrived
            self.pipeline_p2p.finish()
            if errors:
                raise errors[0]
            if value is not None and self.partitioned.is_last:
                joined = map_leaves(to_host, self.partitioned.join_prediction(value))
                form = packable(joined, "the prediction")
        return None if x is None else broadcast_tree(self.comm, form, joined, self.stage_of[-1], "prediction")

    def loss(self, x: Any, y: Any, run: Run = EVALUATE) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction on the last stage, 0.0, 0.0 and None on the others.

        Collective over the pipeline, and over the data group if parameters are sharded. An error of a layer is recorded
        in ``scalars``, which raises it later on all ranks; then the last stage also returns 0.0, 0.0 and None.
        """
        x, y = self.compute_device.put(x), self.compute_device.put(y)
        value = self._forward_only(x, run, self.scalars.fail)
        if x is None or value is None or not self.partitioned.is_last:
            return 0.0, 0.0, None
        with self._computing(_Flight(self.scalars.fail)):
            loss, weight, _ = self.criterion.forward(value, y)
            loss, weight = loss_and_weight(self.criterion.forward, loss, weight)
            return loss, weight, map_leaves(to_host, self.partitioned.gather_class_scores(value))
        return 0.0, 0.0, None  # and continue with the other micro-batches

    def _forward_only(self, x: Any, run: Run, fail: Callable[[Exception], None]) -> Any:
        if x is None:
            for chunk in self.partitioned.chunks:
                for unit, following in with_next(self.units[chunk]):
                    with self.store.unshard(unit, following):
                        pass
            return None
        self._predicted += 1  # messages of one route come in order; the number only keeps receives apart
        value, run = None, self.partitioned.run_on(x, run)
        for chunk in self.partitioned.chunks:
            value = self._pass_forward(chunk, -self._predicted, x, run, _Flight(fail))
        self.store.progress.poll()
        return self.blocks.released(value)

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` in place of the model's own loss inside the context; None keeps it. Not collective."""
        return replaced_criterion(self, self.partitioned.local_loss(loss))

    # ------------------------------------------------------------------ messages

    def _post(self, instruction: Instruction, batches: Sequence[MicroBatch]) -> None:
        batch = batches[instruction.micro]
        if batch.grain is None:
            return
        key = key_of(batch.samples[0])
        chunk = instruction.chunk
        if instruction.kind == "forward" and chunk > 0:
            self.pipeline_p2p.post(Route("forward", chunk), instruction.micro, key, self.stage_of[chunk - 1])
        elif instruction.kind in _BACKWARD_KINDS and chunk < len(self.stage_of) - 1:
            self.pipeline_p2p.post(Route("backward", chunk), instruction.micro, key, self.stage_of[chunk + 1])


class BlockTimes(NamedTuple):
    """Hold the seconds that one block takes for one micro-batch.

    The fields are the times of the forward pass, of the gradient of the input, and of the gradients of the weights.
    """

    forward: float
    backward_input: float
    backward_weights: float


def measured_costs(model: BlockModel, x: Array, y: Array, mesh: Mesh | ShardingConfig, repeats: int = 3) -> list[float]:
    """Measure the seconds of each block's forward and backward pass, for ``costs``, which balances pipeline stages.

    Collective over the ranks of ``mesh``. Rank 0 measures by :func:`measure_blocks`, and every rank returns rank 0's
    times in the order of the blocks, so that all ranks cut the model at the same blocks.

    Parameters
    ----------
    model, x, y, repeats
        As in :func:`measure_blocks`.
    mesh : Mesh or ShardingConfig
        The ranks that return the times.

    Returns
    -------
    list of float
        Seconds of each block, in the order of the blocks.

    Raises
    ------
    ConfigError
        On all ranks, if ``model`` is not a model of blocks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with mz.Mesh("self") as mesh:
    ...     x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    ...     costs = mz.sharding.measured_costs(mz.nn.MLP(2, [4], 2), x, y, mesh)
    >>> len(costs), min(costs) > 0.0  # one a block, for mz.Config(costs=costs)
    (2, True)
    """
    comm = mesh.communicator
    costs: list[float] = []
    record_call(comm, "measured_costs")
    with all_ranks(comm, first=True):
        if comm.rank == 0:
            costs = [sum(times) for times in measure_blocks(model, x, y, repeats).values()]
    result: list[float] = comm.broadcast_object(costs, 0, "measured costs")
    return result


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
        If ``model`` is not a model of blocks.
    """
    if not isinstance(model, BlockModel):
        raise ConfigError(
            f"{type(model).__name__} is a black box: only models of blocks can be measured block by block"
        )
    specs, run = blocks_of(model), Run(training=True, seed=model.seed)
    homes = by_global_name(specs)
    by_block: dict[str, BlockTimes] = {}
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
        by_block[name] = BlockTimes(*(min(column) for column in zip(*times, strict=True)))
        value = out
    return by_block


def _gradient_like(array: Array) -> Array | None:
    """Return ones of the shape of ``array``; None for whole numbers, which have no gradient."""
    return np.ones_like(array) if array.dtype.kind in "fc" else None


def _parameters(
    model: BlockModel, block: str, specs: tuple[ParameterSpec, ...], homes: dict[str, ParameterSpec], fill: StartValues
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Allocate a block's parameters, with their initial values, and its gradients, uninitialized; return both by name.

    ``specs`` are the block's parameters. ``homes`` holds, by full name, the parameters whose values tied parameters
    share. ``fill`` writes start values.
    """
    params, grads = {}, {}
    for spec in specs:
        name = spec.tied or joined(block, spec.name)
        flat = np.empty(spec.size, model.dtype)
        fill(replace(homes[name], name=name), 0, spec.size, flat)
        params[spec.name], grads[spec.name] = spec.view(flat), spec.view(np.empty_like(flat))
    integers = fresh_integers(model.blocks[block])
    return nested(params | integers), nested(grads | integers)
