"""Apply layers to their own output, several times, with gradients through all of these steps.

:class:`Repeat` is the layer, and :class:`Rollout` makes the model of it that trains an emulator over several time
steps. Only the states between steps are kept for the backward pass. It computes the activations of one step again,
passes the gradient through it, and goes on to the step before (Chen et al., *Training Deep Nets with Sublinear Memory
Cost*, 2016). The gradients of the steps are added from the last step to the first one, so their sum has the same bits
on every layout. Each rank has its share of a gradient, so the shares of all steps are added on the rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from mpizero._util.checks import flag, require, whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import flat_names, nested, value_at
from mpizero.nn.arrays import namespace
from mpizero.nn.layer import Graph, Layer, NodeOutput, Operations, Wrapper, layer_integers, poll
from mpizero.nn.layers import Checkpointed, Sequential, completed
from mpizero.nn.losses import CrossEntropy, GaussianNLLLoss
from mpizero.nn.models import export_computation_graph
from mpizero.types import EVALUATE, Array, BlockModel, Params, Run


@explains
@dataclass(frozen=True)
class Repeat(Wrapper):
    """Apply a layer to its own output ``steps`` times, and return all states, or the last one.

    Channels of the input that are more than those of the output come last and are the same in every step: topography, a
    mask, a forcing. The states are returned one after the other on the last axis, (..., steps * channels). Parameters
    keep the layer's names. A dropout in the layer has one mask for all steps. A layer that returns no gradient of its
    input cannot be repeated, and one with averages or integer arrays is not allowed.

    Parameters
    ----------
    layer : Layer
        The layer that is repeated.
    steps : int
        How often, at least once.
    last : bool
        Whether only the last state is returned.
    residual : bool
        Whether the layer returns the change of the state in a step, and not the state itself.
    activation_checkpointing : bool
        Whether the backward pass computes the activations of each step again; else all steps keep theirs.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> double = {"weight": np.array([[2.0]]), "bias": np.array([0.0])}
    >>> layer = mz.nn.Repeat(mz.nn.Linear(1, 1), steps=3)
    >>> y, cache = layer.forward(double, np.array([[1.0]]))
    >>> y
    array([[2., 4., 8.]])
    >>> grads = {"weight": np.empty((1, 1)), "bias": np.empty(1)}
    >>> layer.backward(double, cache, np.array([[0.0, 0.0, 1.0]]), grads)  # of the last state, by the input
    array([[8.]])
    >>> grads["weight"]  # of w**3 at w = 2
    array([[12.]])
    """

    steps: int
    last: bool = False
    residual: bool = False
    activation_checkpointing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require("Repeat: steps", self.steps, whole(1))
        for name in ("last", "residual", "activation_checkpointing"):
            require(f"Repeat: {name}", getattr(self, name), flag)
        odd = [spec.name for spec in self.layer.specs() if spec.averaged]
        odd += [spec.name for spec in layer_integers(self.layer)]
        if odd:
            raise ConfigError(
                f"Repeat: {odd[0]!r} is an average or an integer array, which has no sum over steps; repeat layers "
                "whose state are trained parameters alone, with ChannelLayerNorm or GroupNorm in place of averages"
            )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the states, and the caches of all steps. Collective if the layer is split."""
        given, states, caches = x, list[Array](), list[Any]()
        for step in range(self.steps):
            if step:
                poll(params)
                given = self._next_input(states[-1], x)
            state, cache = self._step.forward(params, given, run)
            if self.residual:
                _require_state(state, x)
                state = given[..., : state.shape[-1]].astype(state.dtype) + state
            states.append(state)
            caches.append(cache)
        y = states[-1] if self.last or self.steps == 1 else namespace(x).concatenate(states, axis=-1)
        return y, caches

    @property
    def _step(self) -> Layer:
        return Checkpointed(self.layer) if self.activation_checkpointing else self.layer

    def _next_input(self, state: Array, x: Array) -> Array:
        """Return a state with those channels of ``x`` that are the same in every step."""
        _require_state(state, x)
        rest = x[..., state.shape[-1] :]
        xp = namespace(state)
        return xp.concatenate([state, rest.astype(state.dtype)], axis=-1) if rest.shape[-1] else state

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x`` and those of the parameters. Collective if the layer is split."""
        channels = dy.shape[-1] // (1 if self.last else self.steps)
        names = tuple(spec.name for spec in self.layer.specs() if spec.trainable)
        total: dict[str, Array] = {}
        dx = rest = None
        for step in reversed(range(self.steps)):
            poll(params)
            d = dy[..., -channels:] if self.last else dy[..., step * channels : (step + 1) * channels]
            if step < self.steps - 1:
                if dx is None:
                    raise ConfigError("Repeat: no gradient reaches the step before: the layer does not return one")
                carried = dx[..., :channels]
                d = carried if self.last else d + carried
                rest = dx[..., channels:] if rest is None else rest + dx[..., channels:]
            grads = completed(params, {}, names)
            dx = self._step.backward(params, cache[step], namespace(dy).ascontiguousarray(d), grads)
            if self.residual and dx is not None:
                dx = namespace(dx).concatenate([dx[..., :channels] + d, dx[..., channels:]], axis=-1)
            for name, gradient in flat_names(grads):
                total[name] = total[name] + gradient if name in total else gradient
        if dx is not None and rest is not None and rest.shape[-1]:
            dx = namespace(dx).concatenate([dx[..., :channels], dx[..., channels:] + rest], axis=-1)
        return dx, total

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Write the sums over all steps. Not collective."""
        for name, gradient in pending.items():
            value_at(grads, name)[...] = gradient

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the states. Not collective."""
        *space, channels = self.layer.output_shape(shape)
        return (*space, channels * (1 if self.last else self.steps))

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the layer's operations, times the number of steps, and those computed again. Not collective."""
        return sum([self._step.operations(shape)] * self.steps, Operations())

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add one node with all parameters to the exported computation graph, and return it. Not collective."""
        return graph.add_layer(self, name, source, self.output_shape(source.shape))


@explains
@dataclass(frozen=True)
class Rollout:
    """Describe a model that applies another model to its own output several times, and is trained through all steps.

    For a model of one time step, such as an :class:`~mpizero.nn.FNO`, a :class:`~mpizero.nn.UNet` or an
    :class:`~mpizero.nn.MLP` for regression. Its output and its targets are the states of all steps, one after the other
    on the last axis: (samples, space, steps * channels). The parameters have the names, and the start values, of the
    model, so checkpoints of both are the same, and rollouts of different length, too. All blocks become one, without a
    name, which is not cut into stages of a pipeline and is one unit of ZeRO-3. See :class:`Repeat` for further channels
    of the input, and for what is kept in memory.

    Parameters
    ----------
    model : BlockModel
        The model of one step.
    steps : int
        How often it is applied.
    last : bool
        Whether output and targets are the last state alone.
    residual : bool
        Whether the model returns the change of the state in a step: the next state is the sum of both.
    loss : Loss or None
        A loss of all states; None is the model's.
    activation_checkpointing : bool
        Whether activations within a step are computed again in the backward pass.

    Raises
    ------
    ConfigError
        If a setting is not allowed, or the model predicts classes or distributions, which are no state.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> step = mz.nn.FNO(inputs=1, outputs=1, axes=1, modes=4, width=8, layers=2)
    >>> net = mz.nn.Rollout(step, steps=3)
    >>> mz.nn.model_specs(net)[0].name == mz.nn.model_specs(step)[0].name
    True
    >>> x = np.random.default_rng(0).normal(size=(8, 16, 1))
    >>> y = np.concatenate([x[:, ::-1], x, x[:, ::-1]], axis=-1)  # three states
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.distribute(net, mz.Adam(lr=0.01), "ddp", config=config) as model:
    ...         losses = [model.train(x, y) for step in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    model: Any
    steps: int
    last: bool = False
    residual: bool = False
    loss: Any = None
    activation_checkpointing: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.model, type) or not isinstance(self.model, BlockModel):
            raise ConfigError(f"Rollout takes a model of blocks, such as mpizero.nn.FNO(...), got {self.model!r:.80}")
        if self.loss is None:
            object.__setattr__(self, "loss", self.model.loss)
        loss = getattr(self.loss, "loss", self.loss)  # of a FieldLoss
        if getattr(self.model, "task", None) == "classification" or isinstance(loss, CrossEntropy | GaussianNLLLoss):
            raise ConfigError(
                f"Rollout: {type(self.model).__name__} with {type(loss).__name__} predicts no state, which is the next "
                'step\'s input; set task="regression" and a loss of states, such as mpizero.nn.MeanSquaredError()'
            )
        _ = self.blocks  # raises the errors of its layers

    @cached_property
    def blocks(self) -> dict[str, Layer]:
        """The one block, whose name is empty so that parameters keep their names."""
        blocks = self.model.blocks
        layer = _with_input_gradient(blocks[""] if "" in blocks else _joined_blocks(blocks))
        return {"": Repeat(layer, self.steps, self.last, self.residual, self.activation_checkpointing)}

    @property
    def dtype(self) -> Any:
        """The dtype of the model's parameters."""
        return self.model.dtype

    @property
    def seed(self) -> int:
        """The model's seed."""
        return int(self.model.seed)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, if the model has it."""
        return tuple(self.model.sample_shape)

    def export_computation_graph(self) -> dict[str, Any]:
        """Describe the model as a dict of JSON values; see :func:`mpizero.nn.export_computation_graph`."""
        return export_computation_graph(self, self.sample_shape)


def _require_state(state: Array, x: Array) -> None:
    """Raise :class:`DataError` if ``state`` is not the first channels of an input like ``x``."""
    if state.shape[:-1] != x.shape[:-1] or state.shape[-1] > x.shape[-1]:
        raise DataError(
            f"Repeat: the output has shape {state.shape}, which is no input of the next step, of shape {x.shape}; "
            "repeat a layer that returns the first channels of its input, at all positions"
        )


def _joined_blocks(blocks: Mapping[str, Any]) -> Sequential:
    """Return blocks as one layer whose parameters have the global names: a dot in a block's name is one level more."""
    tree = nested(blocks)
    if [name for name, _ in flat_names(tree)] != list(blocks):
        raise ConfigError(f"Rollout: blocks whose names begin alike must follow each other, got {', '.join(blocks)}")
    return _sequence(tree)


def _sequence(tree: Mapping[str, Any]) -> Sequential:
    return Sequential({name: _sequence(one) if isinstance(one, Mapping) else one for name, one in tree.items()})


def _with_input_gradient(layer: Any) -> Any:
    """Return a layer whose first layers compute the gradient of their input, which the first ones of models do not."""
    if type(layer) is Sequential:
        return Sequential({name: _with_input_gradient(child) for name, child in layer.layers})
    found = {item.name: getattr(layer, item.name) for item in fields(layer)} if is_dataclass(layer) else {}
    changes = {name: _with_input_gradient(child) for name, child in found.items() if isinstance(child, Layer)}
    if found.get("input_gradient") is False:
        changes["input_gradient"] = True
    return replace(layer, **changes) if any(new is not found[name] for name, new in changes.items()) else layer
