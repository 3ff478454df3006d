"""Define sharded optimizers: each rank runs a gradient-based optimizer on the ranges of parameters that it owns.

:class:`ShardedOptimizer` binds any optimizer to a sharded model. Two subclasses send fewer bytes:
:class:`GradientCompressionOptimizer` sends compressed gradients, and :class:`LocalSGDOptimizer` averages parameters
every few steps (local SGD, Stich 2019), and gives each rank its own copy of the model (``Model._become_local``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mpizero import checkpoint, optim
from mpizero._util.checks import require, whole
from mpizero._util.names import SETTINGS, explains, no_attribute
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, agree_equal, agree_on_call, check_call, collective, recorded
from mpizero.comm.reduce import codec_of
from mpizero.errors import ArgumentError, ConfigError, StateError, UnknownNameError
from mpizero.optim.elementwise import adapt, plain, tensor_slots
from mpizero.sharding.config import Config, ShardingConfig, check_bucket, ranks_of
from mpizero.sharding.fit import OptimizationOptions, OptimizationResult, run_loop
from mpizero.sharding.full_params import take
from mpizero.sharding.parameter_access import ParameterAccess, checked_state, gather_slot, slot_entries
from mpizero.sharding.saved_attributes import opened_alike
from mpizero.sharding.state_dict import restore_state
from mpizero.sharding.update import Updater
from mpizero.sharding.whole_tensors import home_of
from mpizero.types import Array, as_reals

if TYPE_CHECKING:
    from mpizero.sharding.model import Model


@explains
class ShardedOptimizer:
    """Update a sharded model with a gradient-based optimizer: each rank updates the ranges that it owns.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        A library optimizer, or any object with an elementwise ``update(params, grads, state)``.
    config : ShardingConfig or None
        The configuration of the model. None means that of the model to which the optimizer is bound.
    options : OptimizationOptions or None
        Default options of :meth:`optimize`.
    loss_scale : DynamicLossScale or None
        Factor by which the loss is multiplied before the backward pass, and by which the gradient is divided after it.
        A step whose gradient is not finite is skipped, and the factor is lowered. None uses no loss scale, except with
        ``mixed_precision="float16"``.

    Raises
    ------
    TypeError
        If ``wrapped_optimizer`` is not gradient-based. The message names the missing method.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW()) as model:
    ...     type(model.optimizer).__name__, model.optimizer.step_count
    ('ShardedOptimizer', 0)
    """

    #: Strategies of the models to which this class can be bound; empty for any strategy.
    strategies: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        wrapped_optimizer: Any,
        config: ShardingConfig | None = None,
        *,
        options: OptimizationOptions | None = None,
        loss_scale: optim.DynamicLossScale | None = None,
    ) -> None:
        if config is not None:
            ranks_of(type(self), config).unbound.add(self)
        if loss_scale is not None and not isinstance(loss_scale, optim.DynamicLossScale):
            raise ArgumentError(f"{type(self).__name__}: loss_scale is a DynamicLossScale or None, got {loss_scale!r}")
        self.wrapped_optimizer = adapt(wrapped_optimizer)
        self.options = self._checked(options) or OptimizationOptions()
        self._config, self._loss_scale = config, loss_scale
        self._model: Model | None = None
        self._stalled = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse settings of the wrapped optimizer, which would have no effect on this object."""
        if name in SETTINGS:
            raise UnknownNameError(
                f"{name} cannot be set: the wrapped optimizer keeps it; a learning rate that changes is a function of "
                f"the step, {type(self.wrapped_optimizer).__name__}(lr=lambda step: ...)"
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a type checker would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            """Raise :class:`AttributeError`; if PyTorch has an attribute ``name``, the message names the equivalent."""
            raise no_attribute(self, name)

    # ------------------------------------------------------------------ binding and stepping

    def set_model(self, model: Model) -> None:
        """Bind this optimizer to a model, and allocate this rank's optimizer state. Collective over the model's ranks.

        This optimizer becomes ``model.optimizer``; the state of the model's former optimizer is dropped.

        Raises
        ------
        ConfigError
            If the model has another configuration or a strategy that this class does not support, or if ranks bind
            different optimizers.
        """
        if self._config is None:
            _check_sharded(model)
        comm = (model.mesh if self._config is None else self._config.mesh).communicator
        # Without the class in the call's name: agree_equal names ranks whose classes differ.
        check_call(comm, "set_model")
        agree_equal(comm, lambda: self._plans(model), "bind an optimizer")
        self._bind(model)
        self._model = model
        model.mesh.unbound.discard(self)
        model._take_optimizer(self)

    def _bind(self, model: Model) -> None:
        """Bind the wrapped optimizer to the model's engine; subclasses extend this method. Collective."""
        model._engine.bind(self.wrapped_optimizer, model.config.loss_scale(self._loss_scale))

    def _plans(self, model: Model) -> dict[str, Any]:
        """Return all values that must be equal on all ranks when the optimizer is bound, by name. Not collective."""
        _check_sharded(model)
        plans, optimizer = self.comparable(model), self.wrapped_optimizer
        specs = [entry.spec for entry in model._engine.global_view.layout.parameters if not entry.spec.averaged]
        if isinstance(optimizer, optim.FlatOptimizer) or optimizer.needs_vectors:
            optimizer.check_names([spec.name for spec in specs])
        groups = {optimizer.group_of(spec) for spec in specs}
        return plans | {
            "the optimizer's state": (*optimizer.slots, *tensor_slots(optimizer)),
            "the optimizer's first step": {group: optimizer.hyper(1, group, np.float64) for group in sorted(groups)},
        }

    def comparable(self, model: Model) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name. Not collective.

        Raises
        ------
        ConfigError
            If the model's configuration is not the one that this optimizer was given, or its strategy is one that this
            class does not support.
        """
        if self._config not in (None, model.config):
            raise ConfigError(
                "model and optimizer must share one ShardingConfig object; an optimizer that is given none takes the "
                "model's"
            )
        if self.strategies and model._kind not in self.strategies:
            wanted = " or ".join(repr(strategy) for strategy in self.strategies)
            raise ConfigError(
                f"{type(self).__name__} belongs to a model of strategy {wanted}, got {model._name} of {model._kind!r}"
            )
        return {
            "the class of the sharded optimizer": type(self).__name__,
            # the user's own, not what adapts it
            "the optimizer": getattr(self.wrapped_optimizer, "optimizer", self.wrapped_optimizer),
            "the loss scale": model.config.loss_scale(self._loss_scale),
        }

    def for_copy(self, model: Model) -> Self:
        """Return a copy of this optimizer, bound to ``model``. Not collective.

        ``model`` is a copy of this optimizer's model, and its engine already has a copy of the optimizer state.
        """
        twin = copy(self)
        twin._model, twin._stalled = model, False
        return twin

    def _callers(self) -> tuple[Communicator, str]:
        """Return the ranks that must make the same collective calls, and the model's name in error messages."""
        return (self._communicator, "") if self._model is None else self._model._callers()

    @property
    def config(self) -> Config:
        """The configuration that was passed to the constructor; if None, the model's. Not collective."""
        return self.model.config if self._config is None else self._config

    @property
    def _communicator(self) -> Communicator:
        return (self.model.mesh if self._config is None else self._config.mesh).communicator

    @property
    def loss_scale(self) -> optim.DynamicLossScale | None:
        """The loss scale that was passed to the constructor; if None, that of ``mixed_precision``. Not collective."""
        return self.config.loss_scale(self._loss_scale)

    @property
    def model(self) -> Model:
        """The model that this optimizer was last bound to. Not collective."""
        if self._model is None:
            raise StateError(
                f"{type(self).__name__} has no model yet: call set_model first, or give it to a model when that is "
                "made, optimizer=..."
            )
        return self._model

    @property
    def is_bound(self) -> bool:
        """Tell whether this optimizer is bound to a model, and still is the model's optimizer. Not collective."""
        return self._model is not None and self._model._optimizer is self

    @property
    def step_count(self) -> int:
        """The number of updates made so far; skipped steps do not count. Not collective."""
        return self._updater.step_count

    @property
    def _updater(self) -> Updater:
        updater = self.model._engine.updater
        if updater is None or plain(updater.optimizer) is not self.wrapped_optimizer:
            raise StateError("the model has been given another optimizer meanwhile: call set_model again")
        return updater

    @recorded
    def step(self) -> None:
        """Update the parameters from the model's pending gradient. Collective.

        A pending gradient comes from ``compute_gradients``, or from ``train`` with ``auto_sync_gradients=False``. A
        gradient that is not summed over the ranks yet is summed first. After ``train`` with
        ``auto_sync_gradients=True`` no call of ``step`` is needed.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        """
        self.model._apply_pending()

    @recorded
    def optimize(self, data: Any, options: OptimizationOptions | None = None) -> OptimizationResult:
        """Train for ``options.epochs`` epochs over ``data``, with validation and early stopping. Collective.

        Parameters
        ----------
        data : (x, y) arrays, the same on every rank, or a data source
            All samples for training and validation. The first axis of arrays counts samples.
        options : OptimizationOptions or None
            Options of the training; None means the options that were passed to the constructor.

        Raises
        ------
        ConfigError
            If ranks pass different data (of arrays, evenly spaced samples are compared) or have different options.
        NonFiniteError
            If all losses of the first epoch, or all validation losses, are infinite or NaN, or if too many steps in a
            row are skipped (``config.bad_steps``). An infinite or NaN validation loss counts as no improvement.
        """
        return run_loop(self, data, self._checked(options) or self.options)

    def _checked(self, options: Any) -> OptimizationOptions | None:
        if not isinstance(options, OptimizationOptions | None):
            raise ArgumentError(f"{type(self).__name__}: options are OptimizationOptions, got {options!r:.80}")
        return options

    @recorded
    def should_early_stop(self) -> bool:
        """Tell whether the last call of :meth:`note_stall` recorded True on any rank. Collective."""
        return bool(agree_on_call(self._communicator, (self._stalled,))[:, 0].any())

    def note_stall(self, stalled: bool) -> None:
        """Record whether the validation loss has stopped improving, as seen by this rank. Not collective."""
        self._stalled = stalled

    # ------------------------------------------------------------------ state

    @collective
    def reset(self) -> None:
        """Reset optimizer state, step count and loss scale to their values before the first step. Collective."""
        self._updater.reset()
        self.model._engine.exchange.forget()
        self.model._engine.integrity.forget()
        self.model._engine.loss_scale = None if self.loss_scale is None else self.loss_scale.start()
        self._stalled = False

    @collective
    def synchronize_optimizer_state(self) -> int:
        """Make all copies of the optimizer state equal, if they have become different. Collective.

        All ranks take the step count and the loss scale of rank 0. Copies of replicated state on different nodes are
        compared by hash; where they differ, all nodes take the values of the first node.

        Returns
        -------
        int
            Number of differences found: one for each slot (such as "exp_avg") and each inter-node group whose copies
            were not equal.
        """
        updater, grid = self._updater, self.model._engine.grid
        engine = self.model._engine
        world = engine.scalars.world
        updater.step_count, engine.loss_scale = world.broadcast_object((updater.step_count, engine.loss_scale), 0)
        repaired = 0
        if len(updater.shards) > 1:
            state = updater.host_state()
            for slot in sorted(updater.optimizer.slots):  # whole tensors have one owner
                values = state[slot]
                digests = grid.inter_node.allgather_object(hashlib.sha256(values.tobytes()).hexdigest())
                if any(digest != digests[0] for digest in digests):
                    repaired += grid.inter_node.rank == 0
                    grid.inter_node.broadcast(values, 0, slot)
            updater.take_state(state)
        engine.integrity.forget()
        total = np.array([repaired], np.int64)
        world.allreduce(total, "sum", "repaired")
        return int(total[0])

    @collective
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state of the whole model, the same on every rank. Collective.

        The keys are "step_count" and "state". Under "state" is a dictionary for each slot, such as "exp_avg", with an
        array for each parameter name: of the parameter's shape, or of the shape of a matrix optimizer's state array. A
        full-batch method, such as L-BFGS, adds "progress", its scalars.
        """
        updater, engine = self._updater, self.model._engine
        slots: dict[str, dict[str, Array]] = {}
        for slot in updater.state:
            vector = gather_slot(engine, slot)
            slots[slot] = {
                e.spec.name: e.spec.view(vector[e.span.start : e.span.stop]).copy() for e in slot_entries(engine, slot)
            }
        progress = {} if updater.method is None else {"progress": updater.method.progress.saved()}
        return {"step_count": updater.step_count, "state": slots, **progress}

    @recorded
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` has returned. Collective.

        Every rank passes the same state. Strategy and number of ranks may differ from those that ``state_dict`` ran
        with.

        Raises
        ------
        LayoutError
            If a slot, name or shape is missing or differs; nothing is changed then.
        ConfigError
            If ranks pass different states. The message names the first rank and array that differ.
        """
        updater, engine = self._updater, self.model._engine
        comm = self._communicator
        source = 0 if engine.grid.world.size == comm.size else comm.rank  # local steps leave every rank its own state
        agree_arrays(comm, "load_state_dict", lambda: checked_state(engine, updater, state), source)
        slots, host = state["state"], updater.host_state()
        for slot, arrays in slots.items():
            for piece in updater.state_pieces(slot):
                values = np.asarray(arrays[home_of(piece.spec)], piece.spec.element_type(host[slot].dtype))
                take(piece.spec, as_reals(values), piece.start, host[slot][piece.state : piece.state + piece.size])
        updater.take_state(host)
        if updater.method is not None:
            updater.method.restore(deepcopy(state["progress"]))
        engine.integrity.forget()
        updater.step_count, updater.last_rate = int(state["step_count"]), None

    @collective
    def serialize(self) -> bytes:
        """Return the optimizer state as the bytes of an HDF5 file, the same on every rank. Collective."""
        return checkpoint.to_bytes(
            self.model._optimizer_arrays(), self.model._checkpoint_attributes(), self._communicator
        )

    @recorded
    def deserialize(self, data: bytes) -> None:
        """Restore the optimizer state from bytes of ``serialize``; every rank passes the same bytes. Collective."""
        with opened_alike(self._communicator, "deserialize", data) as reader:
            restore_state(self.model._loadable_engine, reader)

    @collective
    def save(self, path: str | Path) -> None:
        """Write the optimizer state to the checkpoint folder ``path``, replacing an existing one. Collective."""
        model = self.model
        checkpoint.write(
            path, model._optimizer_arrays(), model._checkpoint_attributes(), self._communicator, replace=True
        )

    @collective
    def load(self, path: str | Path) -> None:
        """Restore the optimizer state that ``save`` wrote with any strategy on any number of ranks. Collective.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        CheckpointError
            If the checkpoint is damaged, or has the state of another optimizer.
        """
        with checkpoint.open_checkpoint(path, self._communicator) as reader:
            restore_state(self.model._loadable_engine, reader)


def _check_sharded(model: Any) -> None:
    if not isinstance(model, ParameterAccess):
        raise ArgumentError(
            f"set_model takes a sharded model, such as mz.distribute returns; got {type(model).__name__}"
        )


class GradientCompressionOptimizer(ShardedOptimizer):
    """Update parameters from compressed gradients with error feedback.

    When bound, the optimizer makes the model compress the gradients that are sent between nodes, or between ranks if
    they share no memory, as ``ShardingConfig(gradient_compression=compression)`` does. Ranks that share memory send
    each other nothing. With top-k and int8, the part of a gradient that a message leaves out is kept and added to the
    next gradient (see ``mpizero.comm.reduce``). Every strategy and communicator can be used. Binding another optimizer
    to the model ends the compression. With compression, results on different numbers of ranks or nodes are no longer
    equal to the bit.

    Parameters
    ----------
    wrapped_optimizer, config, options, loss_scale
        As in :class:`ShardedOptimizer`.
    compression : str
        "topk:SHARE", "int8", "bf16" or "fp16".

    Raises
    ------
    ConfigError
        If the compression is unknown, the wrapped optimizer needs the exact gradient of all samples, or the
        configuration of the model has a ``bucket_mb`` or a ``wire``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    >>> def bytes_sent(comm, optimizer):
    ...     with mz.ShardingConfig(comm=comm, share_node_memory=False) as config:
    ...         with mz.distribute(mz.nn.MLP(4, [64], 2), optimizer, "ddp", config=config) as model:
    ...             part = slice(2 * comm.rank, 2 * comm.rank + 2)
    ...             model.train(x[part], y[part])
    ...             return model.last_step.bytes_sent
    >>> packed = mz.testing.run_in_threads(2, lambda comm: bytes_sent(
    ...     comm, mz.GradientCompressionOptimizer(mz.AdamW(), compression="int8")))
    >>> packed[0] < 0.7 * mz.testing.run_in_threads(2, lambda comm: bytes_sent(comm, mz.AdamW()))[0]
    True
    """

    def __init__(
        self,
        wrapped_optimizer: Any,
        config: ShardingConfig | None = None,
        *,
        compression: str = "topk:0.01",
        options: OptimizationOptions | None = None,
        loss_scale: optim.DynamicLossScale | None = None,
    ) -> None:
        super().__init__(wrapped_optimizer, config, options=options, loss_scale=loss_scale)
        if codec_of(compression) is None:
            raise ConfigError("compression=None: expected 'topk:SHARE', 'int8', 'bf16' or 'fp16'")
        if config is not None:
            check_bucket(config, compression, "compression")
        _check_elementwise(self)
        self.compression = compression

    def comparable(self, model: Model) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, including the compression. Not collective."""
        check_bucket(model.config, self.compression, "compression")
        if model.config.wire is not None:
            raise model.config.reject("wire", f"leave it out, or give no {type(self).__name__}")
        return super().comparable(model) | {"compression": self.compression}

    def _bind(self, model: Model) -> None:
        super()._bind(model)
        model._engine.exchange.compress(self.compression)


class LocalSGDOptimizer(ShardedOptimizer):
    """Train one copy of the model on each rank's batches, and average the copies every ``every`` steps.

    The mean is a tree sum over ranks, so it has the same bits on every rank. Unlike with the sharded strategies, the
    result depends on the number of ranks. The optimizer must be bound to a model of strategy "ddp". Once it is bound,
    each rank has its own parameters and optimizer state. ``train`` returns the mean loss over the batches of all ranks.
    ``evaluate`` evaluates each rank's samples with the parameters of that rank, and sums over all ranks. A checkpoint
    holds the mean of the parameters, and the optimizer state of rank 0.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        As in :class:`ShardedOptimizer`.
    config : ShardingConfig or None
        As in :class:`ShardedOptimizer`.
    every : int
        Number of steps from one averaging of the parameters to the next.

    Raises
    ------
    ConfigError
        If ``every`` is less than 1, the wrapped optimizer needs the gradient of all samples, or, when it is bound, the
        configuration has an ``ema``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> def train(comm):
    ...     with mz.ShardingConfig(comm=comm) as config:
    ...         local = mz.LocalSGDOptimizer(mz.SGD(lr=0.5), every=2)
    ...         with mz.distribute(mz.nn.MLP(2, [], 2), local, "ddp", config=config) as model:
    ...             part = slice(comm.rank, comm.rank + 1)
    ...             for _ in range(4):
    ...                 model.train(x[part], y[part])
    ...             return model.metadata().averaged_every, model.parameters_sha256()
    >>> first, second = mz.testing.run_in_threads(2, train)
    >>> first[0], first == second  # just averaged
    (2, True)
    """

    strategies = ("ddp",)

    def __init__(self, wrapped_optimizer: Any, config: ShardingConfig | None = None, *, every: int = 8) -> None:
        super().__init__(wrapped_optimizer, config)
        _check_elementwise(self)
        self.every = require("every", every, whole(1))

    def comparable(self, model: Model) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, including ``every``. Not collective."""
        if model.config.ema is not None:
            raise ConfigError(
                f"ShardingConfig(ema={model.config.ema}) with LocalSGDOptimizer: each rank trains a copy of its own, "
                "so there is no one average; leave ema out"
            )
        return super().comparable(model) | {"every": self.every}

    def _bind(self, model: Model) -> None:
        model._become_local(self.every)
        super()._bind(model)

    @recorded
    def average_parameters(self) -> None:
        """Set the parameters of every rank to the mean over all ranks, now. Collective."""
        self.model._average_parameters()


def _check_elementwise(optimizer: ShardedOptimizer) -> None:
    """Raise ``ConfigError`` if the wrapped optimizer needs the exact gradient of all samples. Not collective."""
    if optimizer.wrapped_optimizer.needs_vectors:
        name = type(optimizer.wrapped_optimizer).__name__
        raise ConfigError(
            f"{type(optimizer).__name__}({name}()): {name} needs the exact gradient of all samples, which its ranks do "
            "not have: give it to a model directly, optimizer=..."
        )
