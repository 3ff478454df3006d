"""Run forward and backward passes: of one micro-batch by an evaluator, of a step's micro-batches by a runner.

An evaluator computes loss and gradients of one micro-batch, with parameters that the store provides unit by unit:
:class:`BlockEvaluator` for a model of blocks, :class:`BlackBoxEvaluator` for a function of all parameters together. A
:class:`Runner` calls an evaluator for the micro-batches of a step: :class:`SequentialRunner` one after the other;
``sharding/pipeline.py`` has the runner of a pipeline. :class:`CheckedMicroBatch` checks every gradient when it is
complete. :func:`evaluate` computes losses without training.

With sharded parameters or gradients every pass is collective. So a rank that has no micro-batch, or whose layer has
raised, still takes part in all gathers and reductions, and an error is raised on all ranks at the end of the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpizero._util.checks import (
    check_names,
    gradient,
    loss_and_weight,
    loss_arguments,
    named,
    take_integers,
    takes_run,
    writes_in_place,
)
from mpizero._util.pytree import as_arrays, map_arrays, map_leaves
from mpizero.comm import ProcessGrid
from mpizero.errors import CollectiveError, DataError, LayoutError, PeerFailure, UnsupportedError
from mpizero.kernels import all_finite, to_host
from mpizero.layout.flat import Unit, flat_names
from mpizero.nn.layer import add_location
from mpizero.nn.recorded import RecordedBlocks, UnitPass
from mpizero.sharding.batch import GlobalBatch, Grain, GrainScalars
from mpizero.sharding.device import ComputeDevice
from mpizero.sharding.grad_reduce import MicroBatch, apart
from mpizero.sharding.integrity import FunctionGradients, WriteCheck
from mpizero.sharding.params import ParameterProvider, ParameterStore
from mpizero.sharding.partition import PartitionedModel
from mpizero.types import EVALUATE, Array, BlackBoxModel, BlockModel, Params, Run

#: Called when a unit's gradients are complete.
UnitDone = Callable[[Unit], None]


class GradientTarget(Protocol):
    """Receive the gradients that an evaluator computes; it calls :meth:`accumulate` only if ``by_block`` is true.

    ``accumulates_blocks`` says whether :meth:`accumulate` must be called before gradients of another block are written.
    """

    by_block: bool
    accumulates_blocks: bool

    def views(self, unit: Unit) -> Mapping[str, Any]:
        """Return the views that a unit's gradients are written to."""

    def accumulate(self, unit: Unit, block: str, dx: Any) -> Any:
        """Take a block's complete gradients; return ``dx``, the gradient of the block's input, or a copy of it."""

    def reduce(self, unit: Unit) -> None:
        """Take the gradients of a unit, which are all complete."""


class BlockEvaluator:
    """Evaluate a model of blocks, unit by unit.

    If parameters are sharded, a unit is gathered before its forward pass and freed afterwards, and again for its
    backward pass. ``loss_scale`` returns the current loss scale. ``run_on`` adds the length of the sequences in a
    micro-batch ``x`` to its ``Run``, if layers are split. After an error of the types ``agreeable``
    (:func:`agreeable_errors`) a rank joins the remaining collectives. After any other error it must not: if layers are
    split over ranks, the other ranks then wait inside a layer. In the methods, "collective if sharded" means collective
    over the data group if parameters or gradients are sharded.
    """

    def __init__(
        self,
        model: BlockModel,
        store: ParameterProvider,
        loss_scale: Callable[[], float],
        run_on: Callable[[Any, Run], Run] = lambda x, run: run,
        agreeable: tuple[type[Exception], ...] = (Exception,),
    ) -> None:
        self.model, self.store, self.loss_scale, self.run_on = model, store, loss_scale, run_on
        self._agreeable = agreeable
        self.criterion = model.loss
        self.blocks = RecordedBlocks(model.blocks, model.loss)
        self.units = store.layout.units
        self._recorded = {unit.index: self.blocks.of_unit(unit.blocks) for unit in self.units}

    def gradients(self, x: Any, y: Any, run: Run, gradients: GradientTarget) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Collective if sharded. If a layer raises an error that all ranks can agree on, this rank first joins the
        remaining collectives, then raises the error.

        Parameters
        ----------
        x, y : array or nested structure
            Samples and targets of the micro-batch.
        run : Run
            The arguments of the forward pass besides parameters and ``x``, such as seed and step.
        gradients : GradientTarget
            Has the views that gradients are written to. Its method ``accumulate`` is called when the gradients of a
            block are complete, ``reduce`` when those of a unit are.
        """
        caches: dict[int, Any] = {}
        clock = self.store.timeline
        with _Passage(self.store, self.units, gradients.reduce, self._agreeable) as passed:
            run = self.run_on(x, run)
            for unit in self.units:
                with passed.unit(unit) as params:
                    x, caches[unit.index] = self._forward(unit, params, x, run)
            if self.criterion is not self.model.loss:
                x = self.blocks.released(x)  # a loss of the user's may keep it
            with clock.span("forward", "loss"):
                loss, weight, cache = self.criterion.forward(x, y)
                loss, weight = loss_and_weight(self.criterion.forward, loss, weight, run)
            with clock.span("backward", "loss"):
                d: Any = self.criterion.backward(cache, self.loss_scale())
            for unit in reversed(self.units):
                with passed.unit(unit) as params:
                    d = self._backward(unit, params, caches.pop(unit.index), d, gradients)
                passed.done(unit)
        return loss, weight

    def _forward(self, unit: Unit, params: Params, x: Any, run: Run) -> tuple[Any, Any]:
        """Return the output of a unit's last block, and what :meth:`_backward` needs: its recorded pass or its caches.

        The blocks' recordings are repeated together where they can be.
        """
        recorded, clock, first = self._recorded[unit.index], self.store.timeline, x
        if not clock.on and (passes := recorded.find(params, x, run)) is not None:
            for block in unit.blocks:
                self.store.wait(block)
            if (y := passes.forward(x, run)) is not None:  # else the block's own pass, below, raises an error
                self.store.progress.poll()
                return y, passes
        caches: dict[str, Any] = {}
        for block in unit.blocks:
            self.store.wait(block)
            begun = clock.begin()
            try:
                x, caches[block] = self.blocks[block].forward(params[block], x, run)
            except Exception as error:
                add_location(error, "block", block, self.blocks[block].forward)
                raise
            clock.end("forward", block, begun)
            self.store.progress.poll()
        recorded.link(params, first, run, caches)
        return x, caches

    def _backward(self, unit: Unit, params: Params, passes: Any, d: Any, gradients: GradientTarget) -> Any:
        """Write the gradients of a unit's blocks, and return the gradient of the first block's input.

        ``passes`` is the second result of :meth:`_forward`, ``d`` the gradient of the last block's output.
        """
        grads, clock, last, caches = gradients.views(unit), self.store.timeline, d, passes
        if isinstance(passes, UnitPass):
            if not clock.on and (steps := passes.backward(params, d, grads)) is not None:
                dx = None
                for block, dx in steps:  # noqa: B007
                    self.store.progress.poll()
                    if gradients.accumulates_blocks:
                        gradients.accumulate(unit, block, None)  # dx is an array of a recording, apart from gradients
                return dx
            caches = passes.separate()
        for block in reversed(unit.blocks):
            self.store.wait(block)
            begun = clock.begin()
            try:
                d = self.blocks[block].backward(params[block], caches.pop(block), d, grads[block])
            except Exception as error:
                add_location(error, "block", block, self.blocks[block].backward)
                raise
            clock.end("backward", block, begun)
            self.store.progress.poll()
            if gradients.by_block:
                d = gradients.accumulate(unit, block, d)
        if isinstance(passes, UnitPass):
            passes.link_backward(params, last, grads)
        return d

    def absent(self, batch: MicroBatch) -> None:
        """Join the gathers and reductions of a micro-batch that only other ranks have. Collective if sharded."""
        _Passage(self.store, self.units, batch.reduce).finish()

    def predict(self, x: Any, run: Run = EVALUATE) -> Any:
        """Return the last block's output for ``x``; if ``x`` is None, only join the gathers. Collective if sharded."""
        with _Passage(self.store, self.units, None, self._agreeable) as passed:
            run = EVALUATE if x is None else self.run_on(x, run)
            for unit in self.units:
                with passed.unit(unit) as params:
                    if x is not None:
                        x, _ = self._forward(unit, params, x, run)
        return self.blocks.released(x)

    def loss(self, x: Any, y: Any, run: Run) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the last block's output; if ``x`` is None, 0.0, 0.0 and None.

        Collective if sharded.
        """
        prediction = self.predict(x, run)
        if prediction is None:
            return 0.0, 0.0, None
        loss, weight, _ = self.criterion.forward(prediction, y)
        return *loss_and_weight(self.criterion.forward, loss, weight), prediction

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` instead of the model's own loss inside the context; None changes nothing. Not collective."""
        return replaced_criterion(self, loss)


@contextmanager
def replaced_criterion(owner: Any, loss: Any) -> Iterator[None]:
    """Replace the attribute ``criterion`` of ``owner`` by ``loss`` inside the context, unless it is None."""
    previous = owner.criterion
    owner.criterion = previous if loss is None else loss
    try:
        yield
    finally:
        owner.criterion = previous


class _Passage:
    """Track the collectives that a rank still has to join in one forward and backward pass.

    The collectives are a gather of parameters before each pass of a unit, and a reduction after its backward pass. A
    rank whose computation fails, or that has no micro-batch, still joins all these collectives, so that no other rank
    waits for it: as a context manager, a passage joins them if the code inside raises an error of the types
    ``agreeable``. ``done`` is called with each unit whose backward pass has ended; None: there is no backward pass.
    """

    def __init__(
        self,
        store: ParameterProvider,
        units: Sequence[Unit],
        done: UnitDone | None,
        agreeable: tuple[type[Exception], ...] = (Exception,),
    ) -> None:
        self.store, self.report, self._agreeable = store, done, agreeable
        backward = list(reversed(units)) if done is not None else []
        self.gathers = deque([*units, *backward])
        self.ends = deque(backward)

    def __enter__(self) -> _Passage:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._agreeable) and not isinstance(error, CollectiveError | PeerFailure):
            self.finish()

    def unit(self, unit: Unit) -> AbstractContextManager[dict[str, Any]]:
        """Gather ``unit`` and begin to gather the unit after it; return a context that yields the unit's parameters.

        Collective over the data group if parameters are sharded.
        """
        self.gathers.popleft()
        following = self.gathers[0] if self.gathers else None
        return self.store.unshard(unit, following, by_block=self.report is not None)

    def done(self, unit: Unit) -> None:
        """Report that the unit's backward pass has ended. Collective over the data group if gradients are sharded."""
        self.ends.popleft()
        if self.report is not None:
            self.report(unit)

    def finish(self) -> None:
        """Join all remaining collectives without computing.

        Collective over the data group if parameters or gradients are sharded.
        """
        while self.gathers or self.ends:
            if len(self.ends) > len(self.gathers):  # a unit gathered for its backward, which has not ended
                self.done(self.ends[0])
                continue
            with self.unit(self.gathers[0]):
                pass


class BlackBoxEvaluator:
    """Evaluate a functional model: a function that needs all parameters together, and computes all gradients together.

    The function returns the gradients or, if ``in_place``, writes them into arrays that are passed to it. In the
    methods, "collective if sharded" means collective over the data group if parameters or gradients are sharded.
    """

    def __init__(self, model: BlackBoxModel, store: ParameterStore) -> None:
        self.model, self.store = model, store
        self.units = store.layout.units
        self.frozen = frozenset(e.spec.name for e in store.layout.entries if not e.spec.trainable)
        self.trained = {e.spec.name: None for e in store.layout.entries if e.spec.trainable}.keys()
        self.integers = frozenset(() if store.integers is None else store.integers.values)
        self.in_place = writes_in_place(model)
        arguments = loss_arguments(in_place=self.in_place)
        self._takes_run = takes_run(model.loss_and_grad, "loss_and_grad", *arguments)
        self._unread: dict[str, Array] = {}
        self._direction: Mapping[str, Array] | None = None
        # Only if the attribute is True: a user's class may have a method loss that returns a mean, for example.
        users: Any = model
        loss = users.loss if getattr(model, "has_loss", False) is True else None
        self._loss_function = None if loss is None else (loss, takes_run(loss, "loss", "parameters", "batch"))

    def gradients(self, x: Any, y: Any, run: Run, gradients: GradientTarget) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Collective if sharded. :meth:`BlockEvaluator.gradients` describes the parameters. ``gradients.accumulate`` is
        not called, because the function returns the gradients of all blocks together.
        """
        params, function = self._parameters(), self._function
        with _Passage(self.store, self.units, gradients.reduce) as passed:
            passed.gathers.clear()  # the function has all parameters
            targets = {unit.index: tuple(flat_names(gradients.views(unit))) for unit in self.units if self.in_place}
            views = {name: view for target in targets.values() for name, view in target}
            with self.store.timeline.span("backward", "loss and gradient"):
                loss, grads, weight = self._loss_and_grad(params, x, y, run, views)
            del params
            writes = self.in_place and self._direction is None
            if not writes:
                check_names(function, grads, self.trained, self.frozen | self.integers)
            for unit in reversed(self.units):
                for name, view in () if writes else targets.get(unit.index) or flat_names(gradients.views(unit)):
                    if name in self.integers:
                        take_integers(function, name, grads.get(name, view), view, run)
                    elif name not in self.frozen:
                        view[...] = gradient(function, name, grads[name], view, run)
                passed.done(unit)
        return loss, weight

    def absent(self, batch: MicroBatch) -> None:
        """Join the gathers and reductions of a micro-batch that only other ranks have. Collective if sharded."""
        self._parameters()
        for unit in reversed(self.units):
            batch.reduce(unit)

    def predict(self, x: Any) -> Any:
        """Return what the model's ``predict`` returns for ``x``; None if ``x`` is None. Collective if sharded."""
        params = self._parameters()
        if x is None:
            return None
        predict = getattr(self.model, "predict", None)
        if predict is None:
            kind = type(self.model).__name__
            raise UnsupportedError(f"{kind} has no predict function: give one, {kind}(..., predict=...)")
        with _explained("predict"):
            result = predict(params, _read_only(x))
        return map_leaves(self._unshared, result)

    def _unshared(self, result: Any) -> Any:
        """Return a copy of ``result`` if it is a view of the parameters, else ``result`` itself."""
        shared = isinstance(result, np.ndarray) and np.may_share_memory(result, self.store.values)
        return result.copy() if shared else result

    def loss(self, x: Any, y: Any, run: Run) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight, and None in place of a prediction. Collective if sharded."""
        params = self._parameters()
        if x is None and y is None:
            return 0.0, 0.0, None
        if self._loss_function is None:
            loss, _, weight = self._loss_and_grad(params, x, y, run, self._unread_gradients())
            return loss, weight, None
        function, takes = self._loss_function
        with _explained("loss"):
            result = function(params, (_read_only(x), _read_only(y)), **({"run": run} if takes else {}))
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayoutError(f"loss must return (loss_sum, weight), it returned {_kinds(result)}")
        return *loss_and_weight(function, *result, run, "loss"), None

    @contextmanager
    def using_loss(self, loss: Any) -> Iterator[None]:
        """Raise ``UnsupportedError`` if ``loss`` is not None: a functional model contains its loss. Not collective."""
        if loss is not None:
            raise UnsupportedError("a black box computes its own loss: another one cannot be put in its place")
        yield

    @contextmanager
    def using_product(self, direction: Mapping[str, Array] | None) -> Iterator[None]:
        """Inside the context, :meth:`gradients` computes the model's Hessian ``product`` with ``direction`` instead.

        Not collective. The sum of losses is then 0. If ``direction`` is None, gradients are computed as usual.
        """
        self._direction = direction
        try:
            yield
        finally:
            self._direction = None

    @property
    def _function(self) -> Callable[..., Any]:
        """The user's function: it computes the gradient or, with a direction, the product of Hessian and direction."""
        function: Callable[..., Any] = self.model.loss_and_grad
        return function if self._direction is None else self.model.product  # type: ignore[attr-defined]

    def _parameters(self) -> dict[str, Any]:
        """Return all parameters by name: views of the store, or copies if they are sharded. Collective if sharded."""
        parameters: dict[str, Any] = {}
        for unit, following in with_next(self.units):
            with self.store.unshard(unit, following) as params:
                for name, array in flat_names(params):
                    parameters[name] = _read_only(array.copy()) if self.store.sharded else array
            if self.store.sharded:
                self.store.memory.barrier("black box")
        return parameters

    def _unread_gradients(self) -> dict[str, Array]:
        """Return arrays for gradients that are not read: a function that works in place writes them with the loss.

        Not collective. The arrays are allocated at the first call. If the function does not work in place, the returned
        dictionary is empty.
        """
        if self.in_place and not self._unread:
            buffer = self.store.memory.private("buffers", self.store.layout.size, self.store.dtype)
            entries = self.store.layout.parameters
            self._unread = {e.spec.name: e.spec.view(buffer[slice(*e.span)]) for e in entries}
            if self.store.integers is not None:
                self._unread |= {name: value.copy() for name, value in self.store.integers.values.items()}
        return self._unread

    def _loss_and_grad(
        self, params: Mapping[str, Any], x: Any, y: Any, run: Run, views: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array], float]:
        """Call the function; return the sum of losses, the gradients and the weight. Not collective.

        A function that works in place writes its gradients into ``views``, which are then returned as the gradients.
        """
        if self._direction is not None:
            return self._product(params, x, y, self._direction)
        args, kwargs = (params, (_read_only(x), _read_only(y))), {"run": run} if self._takes_run else {}
        function: Callable[..., Any] = self.model.loss_and_grad
        if not self.in_place:
            with _explained("loss_and_grad"):
                result = function(*args, **kwargs)
            if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping):
                expected = "(loss_sum, gradients by name, weight)"
                raise LayoutError(f"loss_and_grad must return {expected}, it returned {_kinds(result)}")
            loss, weight = loss_and_weight(function, result[0], result[2], run)
            return loss, result[1], weight
        with (
            _explained("loss_and_grad", more=", and so are the gradients of an earlier call"),
            writable(views) as arrays,
        ):
            result = function(*args, arrays, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} works in place, so it must return (loss_sum, weight) and write "
                f"the gradients into its third argument; it returned {_kinds(result)}"
            )
        loss, weight = loss_and_weight(function, *result, run)
        return loss, views, weight

    def _product(
        self, params: Mapping[str, Any], x: Any, y: Any, direction: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array], float]:
        """Call the model's Hessian ``product``; return the tuple (0, product, weight), with 0 in the place of a loss.

        Not collective.
        """
        with _explained("product"):
            result = self._function(params, (_read_only(x), _read_only(y)), direction)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Mapping):
            raise LayoutError(f"product must return (products by name, weight), it returned {_kinds(result)}")
        loss, weight = loss_and_weight(self._function, 0.0, result[1], None, "product")
        return loss, result[0], weight


#: The two evaluators; each runs a model for one micro-batch.
Evaluator = BlockEvaluator | BlackBoxEvaluator


def with_next(units: Iterable[Unit]) -> Iterator[tuple[Unit, Unit | None]]:
    """Yield each unit together with the unit after it; the last unit comes with None. Not collective."""
    listed = list(units)
    return zip(listed, [*listed[1:], None], strict=True) if listed else iter(())


def _kinds(result: Any) -> Any:
    return [type(v).__name__ for v in result] if isinstance(result, tuple) else type(result).__name__


def _read_only(value: Any) -> Any:
    """Return ``value``, an array or nested structure, with every array replaced by a read-only view of it."""
    if not isinstance(value, np.ndarray):
        return map_arrays(_read_only, value)
    view = value.view()
    view.flags.writeable = False
    return view


@contextmanager
def writable(views: Mapping[str, Array]) -> Iterator[FunctionGradients]:
    """Yield ``views`` as arrays that can be written to inside the context only: a later write raises an error.

    Not collective. A function that keeps the arrays of one call and writes to them later would overwrite other
    gradients.
    """
    arrays = FunctionGradients({name: view.view() for name, view in views.items()})
    written = list(arrays.values())
    try:
        yield arrays
    finally:
        for view in written:
            view.flags.writeable = False


@contextmanager
def _explained(function: str, more: str = "") -> Iterator[None]:
    """Add advice to an error from writing to a read-only array; the advice contains ``function`` and ``more``."""
    try:
        yield
    except (ValueError, TypeError, BufferError) as error:
        if any(word in str(error) for word in ("read-only", "readonly", "writable", "writeable")):
            reason = f"The arrays that {function} gets are read-only{more}"
            error.add_note(f"{reason}: let it copy what it changes, x = x.copy()")
        raise


#: Returns the ``Run`` of a forward pass, from the index of its first sample and the number of samples.
RunOf = Callable[[int, int], Run]


def agreeable_errors(grid: ProcessGrid) -> tuple[type[Exception], ...]:
    """Return the types of layer errors that are recorded and raised at the end of the step, on all ranks together.

    Not collective. After such an error a rank still joins the collectives of the step. Other errors are raised
    immediately. If layers are split over a tensor or context group, every error is raised immediately, because the
    other ranks of the group wait inside the layer that has raised on this one. One exception is ``DataError`` in a
    tensor group without a context group: all ranks of the group have the same samples, so all of them raise it.
    """
    if grid.tensor.size * grid.context.size == 1:
        return (Exception,)
    return (DataError,) if grid.context.size == 1 else ()


class Runner(ABC):
    """Run the forward and backward passes of a training step, and the forward passes of evaluation and prediction.

    Parameters
    ----------
    partitioned : PartitionedModel
        This rank's part of the model.
    store : ParameterProvider
        Provides the parameters, on the device where the layers compute.
    scalars : GrainScalars
        Collects losses, weights and failures.
    counts : bool
        Whether this rank records the losses that it computes in ``scalars``. The ranks of a tensor group compute equal
        losses, and only one of them records them.
    agreeable : tuple of type
        The types of layer errors that are raised later, on all ranks together; see :func:`agreeable_errors`.
    compute_device : ComputeDevice
        The device where the layers compute.
    sentinels : WriteCheck, optional
        Checks that layers write all of their gradients; None checks nothing.

    Attributes
    ----------
    blocks : RecordedBlocks
        The blocks of this rank's part; none of a functional model.
    """

    def __init__(
        self,
        partitioned: PartitionedModel,
        store: ParameterProvider,
        scalars: GrainScalars,
        *,
        counts: bool,
        agreeable: tuple[type[Exception], ...],
        compute_device: ComputeDevice,
        sentinels: WriteCheck | None = None,
    ) -> None:
        self.partitioned, self.store, self.scalars, self.counts = partitioned, store, scalars, counts
        self.agreeable, self.compute_device, self.sentinels = agreeable, compute_device, sentinels
        self.blocks = RecordedBlocks({})

    @abstractmethod
    def run(self, micro_batches: Iterable[MicroBatch], run_of: RunOf) -> None:
        """Run the forward and backward pass of every micro-batch; record losses, weights and errors in ``scalars``.

        ``run_of`` takes the index of a micro-batch's first sample and its number of samples, and returns the ``Run`` of
        its pass. Collective over the data group if gradients or parameters are sharded, and over the pipeline group.
        """

    @abstractmethod
    def predict(self, x: Any) -> Any:
        """Return the whole prediction for this rank's ``x``, on the host; if ``x`` is None, only join collectives.

        Collective over the data group if parameters are sharded, and over the ranks of a replica.
        """

    @abstractmethod
    def loss(self, x: Any, y: Any, run: Run = EVALUATE) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction of a micro-batch, without computing gradients.

        A rank that does not compute the loss, because another stage does or ``x`` is None, returns 0.0, 0.0 and None.
        The prediction is on the host; in a context group it has this rank's positions of the sequences only. Collective
        over the data group if parameters are sharded, and over the ranks of a replica.
        """

    @abstractmethod
    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` instead of the model's own loss inside the context; None changes nothing. Not collective."""

    def ready(self) -> None:
        """Wait until all updated parameters that other ranks send have arrived. Collective over the data group."""
        self.store.wait()

    def count(self, batch: MicroBatch, loss: float, weight: float) -> None:
        """Record the sum of losses and the weight of a micro-batch, if this rank records losses (``counts``).

        Not collective.
        """
        if self.counts and batch.grain is not None:
            self.scalars.add(batch.grain.number, loss, weight)

    def end_sentinels(self) -> None:
        """End the step's check that layers write all of their gradients (``self.sentinels``). Not collective."""
        if self.sentinels is not None:
            self.sentinels.end(failed=self.scalars.error is not None)
            self.sentinels = self.sentinels if self.sentinels.on else None


class CheckedMicroBatch:
    """Check the gradients of a micro-batch when they are complete, and record the first that is not finite.

    The samples, and the views that layers write gradients to, are on the device where the layers compute.

    Attributes
    ----------
    batch : MicroBatch
        The micro-batch, with its samples on the device where the layers compute.
    by_block : bool
        Whether :meth:`accumulate` is called when the gradients of a block are complete; otherwise :meth:`reduce` checks
        and adds the gradients of all blocks of the unit.
    accumulates_blocks : bool
        Whether :meth:`accumulate` adds a block's gradients, and not only copies what shares memory with them.
    """

    def __init__(self, batch: MicroBatch, runner: Runner) -> None:
        self.batch, self.scalars = runner.compute_device.put_samples(batch), runner.scalars
        self.timeline, self.compute_device = runner.store.timeline, runner.compute_device
        self.by_block = runner.compute_device.tells_blocks
        self.accumulates_blocks = self.by_block and self.batch.accumulates_blocks
        self._sentinels = runner.sentinels
        self._integers = self.scalars.integers if self.scalars.integers.specs else None
        self._only_sums = self._integers is None and self.scalars.watch is None and not self.scalars.averages
        self._written: dict[int, Any] = {}
        self._accumulated: set[str] = set()

    def views(self, unit: Unit) -> Any:
        """Return the views that layers write a unit's gradients to."""
        self._written[unit.index] = self.batch.gradients(unit)
        views = self.compute_device.target(unit, self._written[unit.index])
        if self._sentinels is not None:
            self._sentinels.write_sentinels(views)
        if self._integers is not None:
            self._integers.prepare(unit.blocks)
        return views

    def accumulate(self, unit: Unit, block: str, dx: Any) -> Any:
        """Check a block's gradients, which are complete, and add them to those of other micro-batches.

        If they are only added when the unit is complete, all its blocks are checked together after the last of them.
        Return ``dx``, the gradient of the block's input, or a copy of it if it shares memory with these gradients,
        which the next block may overwrite.
        """
        begun = self.timeline.begin()
        blocks = (block,) if self.accumulates_blocks else unit.blocks[::-1]
        parts = self.batch.flat_gradients(unit, blocks)
        dx = apart(dx, parts)
        if block == blocks[-1]:
            self._accumulate(unit, blocks, parts)
        self.timeline.end("local sums", block, begun)
        return dx

    def reduce(self, unit: Unit) -> None:
        """Check the gradients of a unit, all complete now, and reduce them over the ranks.

        Blocks that have been accumulated before are not checked again. Nothing is checked if :meth:`views` was not
        called for the unit, because a layer has raised before.
        """
        begun = self.timeline.begin()
        if written := self._written.get(unit.index):
            self.compute_device.done(unit, written)
            # The last block came first.
            if blocks := [block for block in reversed(written) if block not in self._accumulated]:
                self._accumulate(unit, blocks, self.batch.flat_gradients(unit, blocks))
            del self._written[unit.index]
        self.batch.reduce(unit)
        self.timeline.end("local sums", unit, begun)

    def _accumulate(self, unit: Unit, blocks: Sequence[str], parts: Sequence[Array]) -> None:
        """Check the gradients of ``blocks``, which ``parts`` holds, and add them to those of other micro-batches."""
        written = self._written[unit.index]
        nothing_to_tell = self._only_sums and all(map(all_finite, parts))
        if not nothing_to_tell and (grain := self.batch.grain) is not None:
            self._check(grain, {block: written[block] for block in blocks}, parts)
            for block in blocks:
                if names := self.scalars.averages.get(block):
                    self._weight_averages(grain, block, written[block], names)
                if self._integers is not None and (unlike := self._integers.take(block, *self.batch.sample_range)):
                    self.scalars.fail_later(unlike)
        self._accumulated.update(blocks)
        for block in blocks if self.batch.accumulates_blocks else ():
            self.batch.accumulate(unit, block)
            if self._sentinels is not None and self.batch.in_scratch:
                self._sentinels.write_sentinels({block: written[block]})  # the next block is written here, too

    def _weight_averages(self, grain: Grain, block: str, views: Any, names: Sequence[str]) -> None:
        """Multiply new values of averaged parameters of a block, ``names``, by the micro-batch's number of samples."""
        values = dict(flat_names(views))
        for view in (values[name] for name in names):
            view *= view.dtype.type(self.batch.sample_range[1])
        self.scalars.check(grain.number, block, {name: values[name] for name in names})  # the product may be infinite

    def _check(self, grain: Grain, written: Mapping[str, Any], parts: Sequence[Array]) -> None:
        """Check that the gradients of some blocks are finite; if one is not, record it in ``scalars``.

        ``written`` has the views of the blocks' gradients by block, ``parts`` has all these gradients as flat arrays.
        If a gradient is not finite because the layer has not written it, an error that says so is recorded.
        """
        finite = all(map(all_finite, parts))
        for block, views in () if finite else written.items():
            missed = None if self._sentinels is None else self._sentinels.missed(block, views)
            if missed is not None:
                self.scalars.fail_later(missed)
            else:
                self.scalars.check(grain.number, block, views)
        if self.scalars.watch is not None:
            for block, views in written.items():
                self.scalars.watch(grain.number, self.batch.number, block, views)


class SequentialRunner(Runner):
    """Run one micro-batch after the other through all blocks of the model, without a pipeline.

    ``evaluator`` runs the model forward and backward for one micro-batch. The other parameters are those of
    :class:`Runner`.
    """

    def __init__(
        self, evaluator: Evaluator, partitioned: PartitionedModel, scalars: GrainScalars, **settings: Any
    ) -> None:
        super().__init__(partitioned, evaluator.store, scalars, **settings)
        self.evaluator = evaluator
        if isinstance(evaluator, BlockEvaluator):
            self.blocks = evaluator.blocks

    def run(self, micro_batches: Iterable[MicroBatch], run_of: RunOf) -> None:
        """Run the forward and backward pass of every micro-batch, one after the other; see :meth:`Runner.run`."""
        for batch in micro_batches:
            if batch.grain is None or self.scalars.error is not None:
                self.evaluator.absent(batch)
            else:
                self._compute(CheckedMicroBatch(batch, self), run_of)
        self.end_sentinels()
        self.ready()  # also for parameters that no micro-batch has read: other ranks of the node may wait for this one

    def _compute(self, checked: CheckedMicroBatch, run_of: RunOf) -> None:
        x, y, _ = checked.batch.samples
        try:
            loss, weight = self.evaluator.gradients(x, y, run_of(*checked.batch.sample_range), checked)
            self.count(checked.batch, loss, weight)
        except Exception as error:  # the evaluator has joined all collectives, so all ranks reach the agreement
            if not isinstance(error, self.agreeable):
                raise
            self.scalars.fail(error)

    def predict(self, x: Any) -> Any:
        """Return the whole prediction for this rank's ``x``; see :meth:`Runner.predict`."""
        local = None if x is None else self.compute_device.put(self.partitioned.local_positions(as_arrays(x)))
        prediction = self.evaluator.predict(local)
        return None if x is None else map_leaves(to_host, self.partitioned.join_prediction(prediction))

    def loss(self, x: Any, y: Any, run: Run = EVALUATE) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction of a micro-batch; see :meth:`Runner.loss`."""
        loss, weight, prediction = self.evaluator.loss(self.compute_device.put(x), self.compute_device.put(y), run)
        if prediction is None:
            return loss, weight, None
        return loss, weight, map_leaves(to_host, self.partitioned.gather_class_scores(prediction))

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` instead of the model's own loss inside the context; None changes nothing. Not collective."""
        return self.evaluator.using_loss(self.partitioned.local_loss(loss))


class _Sums(NamedTuple):
    """Hold the three values to which an :class:`Evaluation` unpacks."""

    loss_sum: float
    weight: float
    correct: int | None


class Evaluation(_Sums):
    """Hold the result of an evaluation: sums over the samples of all ranks. It unpacks to the first three attributes.

    Attributes
    ----------
    loss_sum : float
        Sum of the samples' losses.
    weight : float
        Total weight of the samples, as the loss returns it.
    correct : int or None
        Number of correct predictions, as the loss's method ``correct`` counts them: for cross-entropy those whose
        largest score is that of the target class. None if correct predictions cannot be counted.
    predictions : int
        Number of predictions among which ``correct`` was counted: those whose target is not ignored.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1)) as model:
    ...     for _ in range(10):
    ...         _ = model.train(x, y)
    ...     found = model.evaluate(x, y)
    >>> found.weight, found.correct, found.accuracy, found.loss == found.loss_sum / 2
    (2.0, 2, 1.0, True)
    """

    predictions: int = 0

    def __new__(cls, loss_sum: float, weight: float, correct: int | None, predictions: int = 0) -> Evaluation:
        """Create the tuple of the first three values, with the fourth as an attribute."""
        made = super().__new__(cls, loss_sum, weight, correct)
        made.predictions = predictions
        return made

    @property
    def loss(self) -> float:
        """The mean loss, ``loss_sum / weight``; NaN if the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None if ``correct`` is None or there are no predictions."""
        return None if self.correct is None or not self.predictions else self.correct / self.predictions


def count_correct(loss: Any, prediction: Any, targets: Any) -> tuple[int, int] | None:
    """Return the number of correct predictions and of predictions; None if they cannot be counted.

    The method ``correct(prediction, target)`` of the loss counts them. Without this method they are counted if each
    prediction has one score per class, and each target is the number of a class, or negative to be ignored.
    """
    correct_of = getattr(loss, "correct", None)
    if prediction is None:  # of a black box, or where a layer of another stage has raised
        return None
    if callable(correct_of):
        counted: tuple[int, int] | None = correct_of(prediction, targets)
        return counted
    arrays = isinstance(prediction, np.ndarray) and isinstance(targets, np.ndarray)
    if not arrays or prediction.shape[:-1] != targets.shape or targets.dtype.kind not in "iu":
        return None
    return int((prediction.argmax(-1) == targets).sum()), int((targets >= 0).sum())


def evaluate(
    batch: GlobalBatch, runner: Runner, scalars: GrainScalars, rounds: int, run_of: RunOf, *, scores: bool, loss: Any
) -> Evaluation:
    """Return the sum of losses, the weight and the number of correct predictions over the global batch.

    Collective over all ranks.

    Parameters
    ----------
    batch : GlobalBatch
        This rank's grains.
    runner : Runner
        Runs the model forward.
    scalars : GrainScalars
        Collects losses, weights and failures.
    rounds : int
        Number of forward passes whose collectives every rank joins: if parameters are sharded, as many as the rank with
        the most makes; otherwise 0.
    run_of : callable
        Takes the index of a micro-batch's first sample and its number of samples, and returns the ``Run`` of a training
        pass over them; here it is used with ``training=False``.
    scores : bool
        Whether this rank adds the losses of its grains to the sums. True on one of the ranks that compute the same
        losses, and never on a rank without the last pipeline stage.
    loss : Loss or None
        The loss of whole predictions, by which :func:`count_correct` counts correct predictions.
    """
    right, predictions, scored, done = 0, 0, True, 0
    runner.ready()
    try:
        for grain in batch.grains.values():
            for number, (gx, gy, _) in enumerate(grain.micro_batches):
                done += 1
                run = replace(run_of(*grain.sample_range(number)), training=False)
                loss_sum, weight, prediction = runner.loss(gx, gy, run)
                if not scores or scalars.error is not None:
                    continue
                scalars.add(grain.number, loss_sum, weight)
                counted = count_correct(loss, prediction, gy) if scored else None
                scored = counted is not None
                if counted is not None:
                    right, predictions = right + counted[0], predictions + counted[1]
    except Exception as error:
        if not isinstance(error, runner.agreeable):
            raise
        scalars.fail(error)  # every forward pass that has begun has joined all of its gathers
    for _ in range(done, rounds):
        runner.loss(None, None)
    totals = scalars.agree()
    counts = np.array([right, predictions, not scored], np.int64)
    scalars.world.allreduce(counts, "sum", "correct predictions")
    return Evaluation(totals.loss, totals.weight, None if counts[2] else int(counts[0]), int(counts[1]))
