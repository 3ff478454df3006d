"""Define :class:`Model`, a sharded model that trains, evaluates, saves and loads, and ``distribute``, which creates it.

The methods of :class:`Model` are grouped: training and evaluation; gradients by hand, for users who do not call
``train``; the copies of the model that :class:`LocalSGDOptimizer` averages; checkpoints. Methods that read and set
parameters are in the base class (``sharding/parameter_access.py``). The engine does the computation
(``sharding/engine.py``); the methods here first check that all ranks make the same call, and raise errors that users
understand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpizero import checkpoint, kernels
from mpizero._util.checks import number, require
from mpizero._util.names import explains
from mpizero._util.pytree import SampleTree, count_samples
from mpizero._util.text import notice
from mpizero.checkpoint.format import ALIGNMENT
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, agree_equal, all_ranks, collective, recorded
from mpizero.comm.reduce import gather_spans, mean_over_ranks
from mpizero.errors import ArgumentError, ConfigError, DataError, LayoutError, NonFiniteError, StateError
from mpizero.layout.flat import FlatLayout
from mpizero.layout.mesh import GROUPS
from mpizero.sharding import state_dict
from mpizero.sharding.batch import NO_SAMPLES, StepArguments, Totals, check_weight, tree_total
from mpizero.sharding.config import Config, ShardingConfig, placement, ranks_and_settings
from mpizero.sharding.engine import Engine
from mpizero.sharding.forward_backward import Evaluation
from mpizero.sharding.mesh import AxisSettings, Mesh
from mpizero.sharding.optimizer import ShardedOptimizer
from mpizero.sharding.parameter_access import ModelMetadata, ParameterAccess, Pending, describe, gather_pieces
from mpizero.sharding.params import COMPUTING, Shard, needing
from mpizero.sharding.partition import ParallelLayout, SplitSettings
from mpizero.sharding.step_report import StepReport
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.checkpoint import LocalArray, PendingSave, SnapshotBuffer


@dataclass(frozen=True)
class Gradients:
    """Hold a gradient, which ``compute_gradients`` returns and ``apply_gradients`` takes.

    Attributes
    ----------
    values : 1-D array
        The gradient, one of three kinds; the elements of frozen and averaged parameters are always 0.

        - Not synchronized: the gradient of the sum of losses over the samples that this rank computed.
        - Synchronized: the averaged gradient. With DDP and ZeRO-1 it covers all parameters, with ZeRO-2 and ZeRO-3 only
          the ranges ``model.owned`` of this rank, concatenated.
        - Gathered (by ``gather=True``): the averaged gradient of the whole model, in the order of
          ``gather_full_parameters``.

        In the first two kinds, the gradient of a split model covers only this rank's pipeline stage and tensor part.
    weight : float
        Total weight of the samples of the global batch.
    loss : float
        Mean loss over the global batch.
    synchronized : bool
        Whether the values are summed over the ranks and divided by the weight.
    layout : FlatLayout or None
        Names and offsets of the parameters in a gathered gradient; None for the other kinds.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(2, [], 2), None, "ddp") as model:
    ...     gradients = model.compute_gradients(x, y, gather=True)
    ...     model.apply_gradients(gradients, learning_rate=0.1)
    >>> gradients.weight, gradients.synchronized, {name: g.shape for name, g in gradients.named().items()}
    (2.0, True, {'output.linear.weight': (2, 2), 'output.linear.bias': (2,)})
    """

    values: Array
    weight: float
    loss: float
    synchronized: bool
    layout: FlatLayout | None = None

    def named(self) -> dict[str, Array]:
        """Return the gradient of each parameter by its name, as views in the parameters' shapes. Not collective.

        Raises
        ------
        LayoutError
            If the gradient was not gathered by ``compute_gradients(..., gather=True)``.
        """
        if self.layout is None:
            raise LayoutError("this rank has a part of the gradient: ask for all, compute_gradients(x, y, gather=True)")
        entries = self.layout.parameters
        return {e.spec.name: e.spec.view(self.values[e.span.start : e.span.stop]) for e in entries}


@explains
class Model(ParameterAccess):
    """Train a model whose parameters, gradients and optimizer state are distributed over the ranks of a mesh.

    :func:`~mpizero.distribute` creates models. Construction, and every method that is not marked otherwise, is
    collective over the mesh. The model holds MPI windows and communicators: close it, or use it as a context manager.
    Methods of a closed model raise RuntimeError. When a call fails on one rank, every rank raises (RemoteError reports
    the error of another rank), and the model is unchanged.

    Inside layers that are split over ranks, an error is raised on one rank only, while the others wait for this rank in
    the layer; so an error that is not caught ends the job. Without context groups, a DataError in such a layer does not
    end the job, because all ranks of a tensor group raise it for the same samples.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        The model to train. Training does not change this object: the sharded model holds the parameters.
    config : Config
        The settings.
    mesh : Mesh
        The ranks that train the model.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Which of parameters, gradients and optimizer state are sharded over the replicas.
    parallel_layout : ParallelLayout, optional
        How the model is split over pipeline, tensor and context ranks. None: it is not split.
    optimizer : optimizer, ShardedOptimizer or None
        Updates the parameters: a library optimizer, any object with an elementwise ``update(params, grads, state)``, or
        a sharded optimizer that is bound to no model yet. With None, plain SGD with ``config.learning_rate`` is used
        until a sharded optimizer is bound by its ``set_model``.
    owns_mesh : bool
        Whether closing the model closes the mesh, too.

    Attributes
    ----------
    last_step : StepReport or None
        Results of the last training step: loss, gradient norm, learning rate, bytes sent.

    Raises
    ------
    TypeError
        If the model is None or of a wrong type, or the optimizer is not gradient-based.
    ConfigError
        If ranks pass different models, configurations or optimizers, or a sharded optimizer was created with another
        configuration or does not work with this strategy.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(), "zero1") as model:
    ...     type(model).__name__, model.parameter_count, list(model.named_parameters())[:1]
    ('Model', 22, ['hidden.0.linear.weight'])
    """

    #: Class of the sharded optimizer that is made of a plain optimizer.
    _optimizer_class: type[ShardedOptimizer] = ShardedOptimizer
    _saving: PendingSave | None = None
    _snapshot: SnapshotBuffer | None = None
    #: Path of the loaded checkpoint whose optimizer state was not loaded, because no optimizer was bound; else "".
    _unread = ""
    _warned_plain = _warned_replaced = False

    def _plans(self) -> dict[str, Any]:
        """Return all values that must be equal on all ranks, by name, optimizer settings included. Not collective.

        This method also wraps a plain optimizer in a sharded optimizer.
        """
        plans, optimizer = super()._plans(), self._optimizer
        if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
            if hasattr(self._wrapped, "convert_optimizer"):
                optimizer = self._wrapped.convert_optimizer(optimizer)
            optimizer = self._optimizer = self._optimizer_class(optimizer)
        if optimizer is not None and optimizer.is_bound:
            raise StateError(f"the {type(optimizer).__name__} belongs to another model: give each model its own")
        return {**plans, **({} if optimizer is None else optimizer.comparable(self))}

    @property
    def _call(self) -> str:
        """An example of a call that creates a model with an optimizer, for error messages."""
        return "mz.distribute(model, mz.AdamW(lr=1e-3))"

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The sharded optimizer that is bound to this model. Not collective.

        Raises
        ------
        RuntimeError
            If no optimizer is bound (then plain SGD with ``config.learning_rate`` trains the model), or if the
            optimizer has been bound to another model meanwhile.
        """
        bound = self._optimizer
        if bound is None:
            raise StateError(
                f"this {self._name} has no optimizer: give it one when it is made, {self._call}, or bind one by its "
                "set_model"
            )
        if bound.model is not self:
            raise StateError(
                f"the {type(bound).__name__} of this {self._name} has been bound to another model meanwhile"
            )
        return cast("ShardedOptimizer", bound)

    def _take_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Store ``optimizer`` as the one that is bound to this model. Not collective.

        If a checkpoint was loaded before an optimizer was bound, rank 0 prints a notice that the checkpoint's optimizer
        state was not loaded.
        """
        self._optimizer = optimizer
        if self._unread and self.rank == 0:
            notice(
                f"the optimizer begins anew: its state in {self._unread} was not read, for the "
                "model had no optimizer yet; to go on where that training ended, give the model its optimizer, or call "
                "set_model, before load_model"
            )
        self._unread = ""

    @recorded
    def train(self, x: Any, y: Any, *, epoch: int = 0) -> float:
        """Train one step on this rank's samples of the global batch; return the mean loss over the whole global batch.

        The global batch consists of the samples of rank 0, then those of rank 1, and so on; a rank may have none. If
        the model is split, the ranks of a replica pass the same samples, which count once. With
        ``auto_sync_gradients=False`` only gradients are computed; ``synchronize_gradients`` then sums them over the
        ranks, and the optimizer's ``step`` updates the parameters.

        Parameters
        ----------
        x, y : array, or tree of arrays
            Inputs and targets of this rank's samples. The first axis of every array counts samples. Tuples, lists,
            dictionaries and dataclasses of arrays are cut and redistributed over ranks like one array. A rank without
            samples passes empty arrays of the same types.
        epoch : int
            Passed to the model's functions and layers as ``run.epoch``; it has no other effect. The same on all ranks.

        Raises
        ------
        DataError
            If the ranks' batches do not fit together, for example because arrays differ in type or in the shape of a
            sample. The message names the rank and the array, and says how it differs.
        NonFiniteError
            After too many skipped steps in a row, as ``config.bad_steps`` says.
        """
        self._pending, self._engine.step_arguments = None, StepArguments(epoch)
        if not self._config.auto_sync_gradients:
            totals = self._pend(lambda engine: (engine.local_gradients(x, y), None)).totals
            return totals.mean
        if self._mean_every:
            return self._train_alone(x, y)
        if self._optimizer is None and not self._warned_plain:
            self._warn_plain()
        report = self._with_private_fallback(lambda engine: engine.train(x, y))
        self._stepped(report)
        return report.loss

    def _warn_plain(self) -> None:
        """Print a notice on rank 0 that plain SGD trains this model, because it has no optimizer. Not collective."""
        self._warned_plain = True
        if self.rank != 0:
            return
        unbound = next(iter(self._mesh.unbound), None)
        forgotten = "" if unbound is None else f"; {type(unbound).__name__} is bound to no model: call its set_model"
        notice(
            f"{self._name} has no optimizer: plain SGD with learning_rate={self._config.learning_rate} trains "
            f"it (optimizer=... gives it another){forgotten}"
        )

    @recorded
    def evaluate(self, x: Any, y: Any, *, loss: Any = None, ema: bool = False) -> Evaluation:
        """Evaluate the samples of all ranks without training; return losses and correct predictions.

        ``x`` and ``y`` are inputs and targets of this rank's samples; the result is for all ranks together. It has the
        attributes ``loss`` and ``accuracy``, and unpacks as ``loss_sum, weight, correct``. ``loss`` replaces the
        model's own loss (models of blocks only); None keeps the model's own. With ``ema`` the parameters' moving
        average (``ShardingConfig(ema=...)``) is used during the call instead of the parameters.
        """
        if ema:
            self._check_call("evaluate")
        with self._engine.with_average(use=ema):
            return self._evaluate_alone(x, y, loss) if self._mean_every else self._engine.evaluate(x, y, loss)

    def predict(self, x: Any, *, ema: bool = False) -> Any:
        """Return the predictions for this rank's ``x``; ranks may pass different numbers of samples.

        The ranks of a domain pass their parts of the same fields, and get their parts of the predictions.

        Collective if parameters are sharded (ZeRO-3, FSDP) or the model is split over ranks, even if the ranks share
        memory. Otherwise each rank may call it alone; but with ZeRO-1 and ZeRO-2 on several nodes (on several ranks, if
        they share no memory) the first call after a step is collective, because the ranks wait together for the updated
        parameters. With ``ema`` the parameters' moving average (``ShardingConfig(ema=...)``) is used instead of the
        parameters, and the call is collective.

        Raises
        ------
        CollectiveMismatch
            On all ranks, if the call is collective and other ranks call something else.
        """
        if self._shards_parameters or ema or self._engine.store.in_flight:
            self._check_call("predict")
            self._engine.store.begin_sending()
        if self._engine.partitioned.cut is not None:
            self._engine.agree_on_space(SampleTree.of(x=x), alone=True)
        if not ema:
            with needing(*COMPUTING):
                return self._engine.runner.predict(x)
        engine, comm = self._engine, self._mesh.communicator
        agree = nullcontext() if engine.partitioned.splits_layers else all_ranks(comm)
        with engine.with_average(use=True), agree, needing(*COMPUTING):
            return engine.runner.predict(x)

    @collective
    def check_integrity(self) -> None:
        """Check that the memory of parameters and optimizer state is not corrupted.

        Copies on different ranks are compared with each other. Values are compared with their last hash, unless an
        update has changed them since. If ``config.check_every`` is n > 0, ``train`` calls this method every n steps.

        Raises
        ------
        IntegrityError
            On every rank, if memory is damaged. The message names the tensor, its elements and the rank.
        """
        self._engine.integrity.check()

    def metadata(self) -> ModelMetadata:
        """Describe how parameters, gradients and optimizer state are distributed, and count bytes. Not collective.

        Bytes are counted for this rank: those stored now, and those sent in the last step.
        """
        sent = self.last_step.bytes_sent if self.last_step is not None else 0
        return describe(self._engine, self._mesh, self._label, sent, self._mean_every)

    # ------------------------------------------------------------------ gradients by hand

    @recorded
    def compute_gradients(self, x: Any, y: Any, loss: Any = None, *, epoch: int = 0, gather: bool = False) -> Gradients:
        """Compute the gradient of the mean loss over the global batch; parameters stay unchanged.

        With ``auto_sync_gradients=False`` the returned gradient is only this rank's, not yet summed over the ranks.
        With either setting the model stores the gradient as pending, for the optimizer's ``step``.

        Parameters
        ----------
        x, y : array, or tree of arrays
            This rank's samples of the global batch, as in :meth:`train`.
        loss : Loss or None
            Loss that replaces the model's own; for models of blocks only.
        epoch : int
            As in :meth:`train`.
        gather : bool
            Whether to return the gradient of the whole model on every rank, in the order of ``gather_full_parameters``
            and with the same bits under every strategy.

        Raises
        ------
        ConfigError
            If ``gather`` is True with ``auto_sync_gradients=False``: the gradient is not summed over ranks then.
        """
        if gather and not self._config.auto_sync_gradients:
            raise ConfigError(
                "compute_gradients(gather=True) with auto_sync_gradients=False: these are the rank's own sums; call "
                "synchronize_gradients(gather=True) after it"
            )
        self._engine.step_arguments = StepArguments(epoch, bool(gather))

        def compute(engine: Engine) -> tuple[Totals, Array | None]:
            with engine.runner.using_loss(loss):
                synced = self._config.auto_sync_gradients
                return engine.gradients(x, y) if synced else (engine.local_gradients(x, y), None)

        totals, reduced, *_ = self._pend(compute)
        if reduced is not None:
            return self._gradients(totals, reduced, gather=gather)
        engine = self._engine
        layout = engine.layout
        values = np.zeros(layout.size, engine.dtype)
        flat_gradient = engine.local_sum()
        for entry in layout.entries:
            if entry.gradient >= 0 and not entry.spec.averaged:
                start = layout.gradient_bases[entry.unit] + entry.gradient
                values[entry.offset : entry.offset + entry.spec.size] += flat_gradient[start : start + entry.spec.size]
        return Gradients(values, totals.weight, totals.mean, False)

    @collective
    def synchronize_gradients(self, *, gather: bool = False) -> Gradients:
        """Return the averaged pending gradient: its sum over the data group, divided by the weight of all samples.

        A gradient that is not summed over the ranks yet is summed first; it stays pending. ``gather`` is as in
        :meth:`compute_gradients`, and the same on all ranks.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        """
        totals, reduced, _ = self._reduced_pending("synchronize_gradients")
        return self._gradients(totals, reduced, gather=gather)

    @recorded
    def apply_gradients(self, gradients: Gradients, learning_rate: float) -> None:
        """Subtract ``learning_rate`` times a synchronized gradient from the parameters.

        With ``wire_parameters`` the result is rounded to bfloat16, and the optimizer goes on from there.

        Raises
        ------
        TypeError
            If ``gradients`` does not come from ``compute_gradients`` or ``synchronize_gradients``.
        LayoutError
            If the gradient is not synchronized, or not of this model.
        ConfigError
            If the learning rate is not a finite number or differs between ranks, or if a gradient of which all ranks
            have a copy (DDP, ZeRO-1, gathered) differs between them. The message names the first rank and parameter
            that differ.
        NonFiniteError
            If the gradient is infinite or NaN on some rank.
        """
        engine, comm = self._engine, self._mesh.communicator
        shard, layout, grid = engine.store.shard, engine.layout, engine.grid
        replicated = not (engine.placement.shard_gradients or self._mean_every)
        gathered = gradients.layout if isinstance(gradients, Gradients) else None

        def comparable() -> dict[str, Any]:
            self._check_gradients(gradients)
            rate = require("apply_gradients: learning_rate", learning_rate, number(-math.inf))
            parts = (gathered or layout).parameters if gathered or replicated else ()
            named = {f"the gradient of {e.spec.name!r}": gradients.values[e.span.start : e.span.stop] for e in parts}
            return {"the learning_rate": rate, **named}

        same_data = grid.axes.group(comm.rank, GROUPS["data"])[0] if replicated and not gathered else 0
        agree_arrays(comm, "apply_gradients", comparable, same_data)
        if grid.model.size > 1:
            agree_equal(comm, lambda: {"the learning_rate": float(learning_rate)}, "apply_gradients")
        rate, values = engine.dtype.type(float(learning_rate)), gradients.values
        if gathered:
            values = engine.global_view.owned(values)
        owned = gathered is not None or engine.placement.shard_gradients
        for unit, span, offset in zip(layout.units, shard.spans, shard.offsets, strict=True):
            start = offset if owned else span.start
            engine.store.owned(unit.index)[:] -= rate * values[start : start + span.size]
        engine.exchange.finish(updated=True)
        engine.store.all_gather()
        if engine.updater is not None and not engine.updater.averages_parameters:
            engine.begin_copies()  # master weights; an average of the parameters follows the optimizer alone
        self._pending = self._cache = None

    def _check_gradients(self, gradients: Any) -> None:
        dtype = self._engine.dtype
        if not isinstance(gradients, Gradients):
            raise ArgumentError(
                "apply_gradients takes the Gradients that compute_gradients or synchronize_gradients returned, got "
                f"{type(gradients).__name__}"
            )
        values = gradients.values
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            got = f"{values.dtype} array" if isinstance(values, np.ndarray) else type(values).__name__
            raise ArgumentError(f"apply_gradients: the values of the Gradients are a {dtype} array, got {got}")
        if not gradients.synchronized:
            raise LayoutError(
                "apply_gradients takes a synchronized gradient, this one holds the rank's own sums: call "
                "synchronize_gradients first, and give what it returns"
            )
        sharded = self._engine.placement.shard_gradients
        expected = self._engine.store.shard.size if sharded else self._engine.layout.size
        whose = "those of the ranges that this rank owns" if sharded else "all that this rank's stage and part hold"
        if gradients.layout is not None:
            expected, whose = self.parameter_count, "one for each parameter"
        if values.shape != (expected,):
            raise LayoutError(
                f"apply_gradients needs {expected} values, {whose}, got an array of shape {values.shape}: that of "
                "another model or layout"
            )
        if not kernels.all_finite(np.ascontiguousarray(values)):
            raise NonFiniteError(
                f"apply_gradients: the gradient is infinite or NaN, and the mean loss was {gradients.loss:g}: the "
                "parameters are as before; look at the values before they are applied, or use train or the optimizer's "
                "step, which skip such a step"
            )

    @recorded
    def _apply_pending(self) -> None:
        """Update the parameters from the pending gradient with the bound optimizer; ``optimizer.step`` calls this.

        If the loss or the gradient is infinite or NaN, the update is skipped, and the report ``last_step`` says so.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        NonFiniteError
            After too many skipped steps in a row, as in ``train``.
        """
        engine, pending = self._engine, self._waiting("step")
        totals, sent = pending.totals, pending.sent
        if pending.calls > 1 and not self._warned_replaced:
            self._warned_replaced = True
            if engine.prints_notices:
                notice(
                    f"the step takes the gradient of the last of {pending.calls} calls of compute_gradients: those of "
                    "several calls are not added; ShardingConfig(accumulate=...) adds those of parts of a batch"
                )

        def reduced() -> Array:
            gradient = self._reduced_pending("step")[1]
            self._pending = None
            return gradient

        if self._mean_every:
            self._step_and_average(lambda engine: engine.step(totals, reduced, sent))
        else:
            self._stepped(engine.step(totals, reduced, sent))

    def _pend(self, compute: Callable[[Engine], tuple[Totals, Array | None]]) -> Pending:
        """Call ``compute``, and store the gradient that it returns as pending, until the gradient is applied.

        ``compute`` returns the totals (loss and weight) of the global batch, and the averaged gradient; None in place
        of a gradient that is not summed yet.
        """

        def computed(engine: Engine) -> Pending:
            sent = engine.store.bytes_sent
            return Pending(*compute(engine), sent)

        before = 0 if self._pending is None else self._pending.calls
        self._pending = None
        self._pending = self._with_private_fallback(computed)._replace(calls=before + 1)
        return self._pending

    def _waiting(self, name: str) -> Pending:
        if self._pending is None:
            updated = "train has updated the parameters already, by " if self._config.auto_sync_gradients else ""
            raise StateError(
                f"{name}: no gradient waits for it: {updated}auto_sync_gradients={self._config.auto_sync_gradients}; "
                "call compute_gradients before it, or train with auto_sync_gradients=False"
            )
        return self._pending

    def _reduced_pending(self, name: str) -> tuple[Totals, Array, int]:
        engine, pending = self._engine, self._waiting(name)
        reduced = pending.reduced if pending.reduced is not None else engine.reduce_local(pending.totals)
        self._pending = pending._replace(reduced=reduced)
        return pending.totals, reduced, pending.sent

    def _gradients(self, totals: Totals, reduced: Array, *, gather: bool) -> Gradients:
        """Copy an averaged gradient from the order of a gradient vector to that of the parameter vector.

        In a gradient vector each tied use of a parameter has elements of its own; they are left out here.
        The result has the ranges that this rank owns if gradients are sharded, else all parameters of this rank's stage
        and tensor part; with ``gather`` it has all parameters of the whole model.
        """
        engine, shard = self._engine, self._engine.store.shard
        if gather:
            full = gather_pieces(engine, engine.dtype, lambda p: reduced[p.gradient : p.gradient + p.size])
            return Gradients(full, totals.weight, totals.mean, True, engine.global_view.layout)
        sharded = engine.placement.shard_gradients
        values = np.zeros(shard.size if sharded else engine.layout.size, engine.dtype)
        for piece in engine.pieces():
            start = piece.span.start
            if sharded:
                start += shard.offsets[piece.entry.unit] - shard.spans[piece.entry.unit].start
            values[start : start + piece.size] = reduced[piece.gradient : piece.gradient + piece.size]
        if not sharded:
            data = engine.grid.data
            spans = [Shard(engine.layout, rank, data.size).spans for rank in range(data.size)]
            gather_spans(data, [values[s.start : s.stop] for s in shard.spans], values, spans)
        return Gradients(values, totals.weight, totals.mean, True)

    # ------------------------------------------------------------------ a copy of the model on each rank (local SGD)

    @recorded
    def _become_local(self, every: int) -> None:
        """Give every rank its own copy of the parameters; from now on ``train`` averages them every ``every`` steps.

        Raises
        ------
        ConfigError
            If a rank holds only its part of the model, or of fields.
        """
        if self._parallel_layout is not None:
            raise ConfigError(
                f"{self._name} cannot train by local steps: a rank holds only its part of the model, or of fields (a "
                "domain); use a data-parallel model with LocalSGDOptimizer"
            )
        before, values = self._engine, self.gather_full_parameters().copy()
        before.close()
        alone, device = replace(self._mesh, comm="self"), before.compute_device.device_number
        self._open_engine = Engine(self._wrapped, alone, self._config, self._placement, device=device)
        self._open_engine.integers.copy_from(before.integers)
        self._open_engine.prints_notices = self.rank == 0
        self._mean_every, self._pending = every, None
        self._fill(values)

    @collective
    def _average_parameters(self) -> None:
        """Set the parameters of every rank to their mean over the ranks."""
        self._average()

    def _average(self) -> None:
        self._fill(mean_over_ranks(self._mesh.communicator, self._engine.store.values))

    def _train_alone(self, x: Any, y: Any) -> float:
        return self._step_and_average(lambda engine: engine.train(x, y) if count_samples(x, y) else None)

    def _stepped_alone(self, report: StepReport) -> StepReport:
        """Store the report of a step that this rank made alone, and return it. Not collective.

        With local SGD each engine has one rank, rank 0; the stored report names this rank's number in the mesh instead.
        """
        non_finite = tuple(replace(bad, rank=self.rank) for bad in report.non_finite)
        report = replace(report, non_finite=non_finite, skipped=str(non_finite[0]) if non_finite else None)
        self._stepped(report)
        return report

    def _step_and_average(self, step: Callable[[Engine], StepReport | None]) -> float:
        """Call ``step`` with this rank's engine, and average the parameters over ranks every few steps.

        Return the mean loss over the batches of all ranks. ``step`` returns None on a rank without samples, whose
        parameters then change only when they are averaged.
        """
        comm, engine = self._mesh.communicator, self._engine
        with all_ranks(comm, first=True):
            made = step(engine)
            report = self._idle(engine) if made is None else self._stepped_alone(made)
        sent = comm.counters.bytes_sent
        loss, weight = self._sum_over_ranks([report.loss * report.weight, report.weight]).tolist()
        if weight == 0:  # a step with samples has a positive weight
            raise DataError(NO_SAMPLES)
        if made is None:
            engine.step_number += 1
        if engine.step_number % self._mean_every == 0:
            self._average()
        self.last_step = replace(report, loss=loss / weight, weight=weight, bytes_sent=comm.counters.bytes_sent - sent)
        return self.last_step.loss

    @staticmethod
    def _idle(engine: Engine) -> StepReport:
        """Return the report of a step in which this rank has no samples. Not collective."""
        updater = engine.bound_updater  # local SGD requires an optimizer
        scale = engine.current_loss_scale()
        return StepReport(updater.step_count, 0.0, 0.0, updater.rate, None, None, 0, (), scale, scale)

    def _evaluate_alone(self, x: Any, y: Any, loss: Any) -> Evaluation:
        """Evaluate each rank's samples with that rank's parameters, and return the sums over all ranks.

        ``correct`` is None if the predictions of a rank are not class scores.
        """
        local = Evaluation(0.0, 0.0, 0)
        with all_ranks(self._mesh.communicator, first=True):
            if count_samples(x, y):
                local = self._engine.evaluate(x, y, loss, weightless=True)
        values = [local.loss_sum, local.weight, local.correct or 0, local.predictions, local.correct is None]
        loss_sum, weight, correct, predictions, unscored = self._sum_over_ranks(values).tolist()
        check_weight(weight)
        return Evaluation(loss_sum, weight, None if unscored else int(correct), int(predictions))

    def _sum_over_ranks(self, values: list[float]) -> Array:
        comm = self._mesh.communicator
        table = np.empty((comm.size, len(values)))
        comm.allgather(np.array(values, np.float64), table.reshape(-1), "sums of local steps")
        return tree_total(table)

    # ------------------------------------------------------------------ saving and loading

    def _checkpoint_arrays(self) -> list[LocalArray]:
        """Return the ranges of parameters and optimizer state that this rank saves: views, or copies from a GPU.

        Not collective, except with local SGD. With local SGD rank 0 saves the mean of all ranks' parameters and its own
        optimizer state, and the other ranks save nothing.
        """
        if self._mean_every:
            self._check_call("checkpoint_arrays")
        mean = mean_over_ranks(self._mesh.communicator, self._engine.store.values) if self._mean_every else None
        return self._written(state_dict.local_arrays(self._engine, values=mean))

    def _optimizer_arrays(self) -> list[LocalArray]:
        """Return the ranges of the optimizer state that this rank saves: views, or copies from a GPU.

        Not collective.
        """
        return self._written(state_dict.local_arrays(self._engine, parameters=False))

    def _checkpoint_attributes(self) -> dict[str, Any]:
        """Return the values to save beside the arrays: step count, optimizer, layout, learning rate.

        Collective only with local SGD.
        """
        if self._mean_every:
            self._check_call("checkpoint_attributes")
        values = state_dict.checkpoint_attributes(self._engine)
        return self._mesh.communicator.broadcast_object(values) if self._mean_every else values

    def _written(self, arrays: list[LocalArray]) -> list[LocalArray]:
        return arrays if self.rank == 0 or not self._mean_every else [replace(a, pieces=()) for a in arrays]

    @collective
    def _restore_arrays(self, reader: Any) -> None:
        """Restore parameters and optimizer state from an open checkpoint; errors are as for :meth:`load_model`."""
        state_dict.restore(self._loadable_engine, reader)
        self._pending = self._cache = None

    @collective
    def save_model(
        self,
        path: str | Path,
        *,
        attributes: Mapping[str, Any] | None = None,
        backend: str = "direct",
        replace: bool = True,
        alignment: int = ALIGNMENT,
    ) -> None:
        """Save parameters and optimizer state as a checkpoint folder; by default an existing checkpoint is replaced.

        Parameters
        ----------
        path : path
            The checkpoint folder. The path of rank 0 is used; rank 0 prints a notice if other ranks pass another path.
            A save that ``begin_save`` has started is committed first.
        attributes : dict, optional
            JSON values to save beside the arrays, the same on every rank. ``checkpoint.Reader.attributes`` holds them
            when the checkpoint is read.
        backend, replace, alignment
            As for :func:`mpizero.checkpoint.write`.
        """
        self._finish_save()
        arrays, values = self._checkpoint_arrays(), self._checkpoint_attributes() | dict(attributes or {})
        comm = self._mesh.communicator
        _warn_paths(comm, "save_model", path)
        checkpoint.write(path, arrays, values, comm, backend, replace, alignment=alignment)

    @collective
    def begin_save(
        self,
        path: str | Path,
        *,
        attributes: Mapping[str, Any] | None = None,
        replace: bool = True,
        alignment: int = ALIGNMENT,
    ) -> PendingSave:
        """Start a save like :meth:`save_model`, and return as soon as the values are copied: training can go on.

        A thread writes the copied values. The checkpoint appears when every rank calls ``commit()`` of the returned
        object, a collective call that is short once ``finished`` is true on all ranks. The next save commits this save
        first, and so does closing the model. If an exception ends the ``with`` block of the model, the save is
        discarded. The memory for the copy is kept for the next save.
        """
        self._finish_save()
        _warn_paths(self._mesh.communicator, "begin_save", path)
        self._reserve_snapshot()
        arrays, values = self._checkpoint_arrays(), self._checkpoint_attributes() | dict(attributes or {})
        comm, buffer = self._mesh.communicator, self._snapshot
        self._saving = checkpoint.begin(path, arrays, values, comm, buffer=buffer, replace=replace, alignment=alignment)
        return self._saving

    def _reserve_snapshot(self) -> None:
        """Allocate the memory for the copy of :meth:`begin_save` now, so that its first call is as fast as later ones.

        Not collective.
        """
        memory = self._engine.memory
        if self._snapshot is None:
            self._snapshot = checkpoint.SnapshotBuffer(
                lambda nbytes: memory.private("snapshot", nbytes, np.uint8),
                lambda block: memory.release("snapshot", block),
            )
        self._snapshot.reserve(self._written(state_dict.local_arrays(self._engine, fetch=False)))

    def _finish_save(self) -> None:
        pending, self._saving = self._saving, None
        if pending is not None and not pending.ended:
            pending.commit()

    def _free(self) -> None:
        """Commit a save that :meth:`begin_save` has started, and free the memory of its copy and of the model."""
        try:
            self._finish_save()
        finally:
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None
            super()._free()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the model; after an exception, discard a save that :meth:`begin_save` has started."""
        if error is not None and self._saving is not None:
            self._saving.discard()
        super().__exit__(kind, error, trace)

    @collective
    def load_model(self, path: str | Path, *, strict_layout: bool = False) -> None:
        """Load a checkpoint that ``save_model`` wrote with any strategy on any number of ranks; rank 0's path is used.

        A model without an optimizer loads only the parameters: to continue a training, bind the optimizer first. All
        values are verified before any is replaced. So if an error is raised, parameters and optimizer state are
        unchanged. For the verification, the file is read twice if the model is large and has been trained. If the
        second reading fails after some values were replaced, every use of the model on any rank raises CheckpointError
        until a checkpoint has been loaded completely.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        CheckpointError
            If the checkpoint is damaged or of another model. The message names file, array and reason. With
            ``strict_layout=True`` also if the checkpoint was written with another strategy or other numbers of ranks.
        """
        _warn_paths(self._mesh.communicator, "load_model", path)
        with checkpoint.open_checkpoint(path, self._mesh.communicator) as reader:
            state_dict.restore(engine := self._loadable_engine, reader, strict_layout=strict_layout)
            left = engine.updater is None and reader.attributes.get("mpizero", {}).get("optimizer")
        self._unread = str(path) if left else ""
        self._pending = self._cache = None

    @collective
    def load_parameters(
        self,
        path: str | Path,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool | None = None,
    ) -> state_dict.LoadReport:
        """Load only parameters, all or those whose names match patterns, from a file of any layout; return a report.

        Optimizer state and step number stay unchanged. Each rank reads the ranges of parameters that it holds. All
        values are verified before any is replaced, as for :meth:`load_model`.

        Parameters
        ----------
        path : path
            A checkpoint, a run's folder (its newest checkpoint is read), a safetensors file, or an ``.npz`` file of
            arrays by name. The path of rank 0 is used, and every rank must be able to read the file. Floats of another
            type are converted; an ``.npz`` file is read one array at a time.
        include, exclude : str or sequence of str, optional
            Shell patterns of parameter names, such as ``"encoder.*"`` (``*`` matches dots, too): parameters to load, by
            default all, and parameters to leave out.
        rename : mapping of str to str, optional
            Maps names in the file to names in the model; both may have one ``*``, which stands for the same text in
            both.
        strict : bool, optional
            Whether a chosen parameter that is missing from the file, or has another shape or type there, is an error;
            without patterns also a parameter that is in the file only. The default is True if no pattern is given. With
            False such parameters keep their values, and rank 0 prints their names.

        Returns
        -------
        LoadReport
            Names of the parameters that were loaded, not chosen, missing, of another shape or type, or in the file
            only; ``str(report)`` is one line.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        ConfigError
            If a pattern matches no name, or ranks pass different arguments.
        CheckpointError
            If the file is damaged, none of the chosen parameters can be loaded from it, or ``strict`` requires an
            error. The message names file, parameters and reason.
        """
        with all_ranks(self._mesh.communicator):
            choice = state_dict.Choice.of(include, exclude, rename, strict)
        report = state_dict.load_chosen(self._loadable_engine, path, choice)
        self._pending = self._cache = None
        if self.rank == 0 and report.is_incomplete:
            notice(str(report))
        return report


@explains
def distribute(
    model: Any, optimizer: Any, strategy: str = "zero2", *, mesh: Mesh | None = None, config: Config | None = None
) -> Model:
    """Shard a model and its optimizer over the ranks of a mesh, and split the model along the mesh's axes.

    Collective over the ranks.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model to train.
    optimizer : optimizer, ShardedOptimizer or None
        A library optimizer, any object with an elementwise ``update(params, grads, state)``, or a sharded optimizer;
        for a TorchModel also ``torch.optim.SGD``, ``Adam`` or ``AdamW`` of its module, with their groups. None: plain
        SGD with ``config.learning_rate``.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Which of parameters, gradients and optimizer state are sharded over the replicas.
    mesh : Mesh or None
        The ranks, and how many pipeline stages, tensor and context ranks split the model. None takes the ranks of a
        ShardingConfig, else all ranks that the launcher has started; in the latter case closing the model also frees
        the communicators.
    config : Config or ShardingConfig or None
        The settings; None takes the defaults.

    Returns
    -------
    model : Model
        The model, ready to train. Its attribute ``optimizer`` is the sharded optimizer.

    Raises
    ------
    ConfigError
        If the strategy is unknown, both a mesh and a ShardingConfig are passed, ranks differ in a setting, or ``cuts``
        are set without a pipeline.
    GridError
        If the product of the sizes of the mesh is not the number of ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 2, np.float32), np.array([0, 1] * 2)
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1), "zero2") as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    ...     model.metadata().strategy, model.optimizer.step_count
    ('ZeRO-2', 5)
    >>> losses[-1] < losses[0]
    True
    >>> def held(comm):
    ...     with mz.Mesh(comm, pipeline=2) as mesh, mz.distribute(mz.nn.MLP(4, [6], 2), mz.AdamW(), mesh=mesh) as model:
    ...         return model.metadata().held_count, model.parameter_count
    >>> mz.testing.run_in_threads(2, held)
    [(30, 44), (14, 44)]
    """
    placement(strategy)
    owns = mesh is None and not isinstance(config, ShardingConfig)
    mesh, config = ranks_and_settings(mesh, config)
    if config.cuts is not None and mesh.pipeline == 1:
        raise ConfigError(f"cuts={list(config.cuts)} need a pipeline; the mesh has pipeline=1: mz.Mesh(pipeline=...)")
    split = None
    if mesh.splits_model:
        split = ParallelLayout(**mesh.values_of(AxisSettings), **config.values_of(SplitSettings))
    return Model(model, config, mesh, strategy, parallel_layout=split, optimizer=optimizer, owns_mesh=owns)


def _warn_paths(comm: Communicator, call: str, path: Any) -> None:
    """Print a notice on rank 0 if ranks pass different paths; ``call`` is the method's name for the notice. Collective.

    Only the path of rank 0 is used.
    """
    first, *others = comm.allgather_object(str(path), "path")
    for rank, other in enumerate(others, 1):
        if other != first and comm.rank == 0:
            notice(f"{call}: rank 0's path counts, {first!r}; rank {rank} has given {other!r}")
            return
