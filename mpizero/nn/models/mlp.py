"""Define MLP, a fully connected classifier or regressor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpizero._util.checks import require, seed
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.nn.arrays import namespace, require_numbers
from mpizero.nn.layer import Layer
from mpizero.nn.layers.activation import named_activation
from mpizero.nn.layers.linear import Linear
from mpizero.nn.losses.named_losses import TASKS, loss_for
from mpizero.nn.models.block_model import export_computation_graph, model_dtype
from mpizero.nn.models.predictor import compile_mlp
from mpizero.nn.sequential import Sequential
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, BlockModel, Group, Init, Loss, Params, Run


@explains
@dataclass(frozen=True)
class Select(Layer):
    """Keep the features of the input whose indices are in ``active``, and replace the other features by zeros.

    The layer has no parameters. Inputs and outputs are (..., features). No method is collective.

    Parameters
    ----------
    features : int
        Size of the last axis of the input.
    active : tuple of int
        Indices of the features that are kept, from 0 to ``features - 1``.

    Raises
    ------
    ConfigError
        If an index is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.Select(features=3, active=(0, 2)).forward({}, np.array([[1.0, 2.0, 3.0]]))
    >>> y
    array([[1., 0., 3.]])
    """

    features: int
    active: tuple[int, ...]

    def __post_init__(self) -> None:
        require_positive("Select", features=self.features)
        if any(not 0 <= index < self.features for index in self.active):
            raise ConfigError(f"Select: active={self.active!r} must lie in 0 to {self.features - 1}")

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return a copy of ``x`` (..., features), with zeros for the features that are not active.

        The cache is None.
        """
        require_numbers(x, "Select")
        if x.shape[-1:] != (self.features,):
            raise DataError(
                f"Select: takes {self.features} features on the last axis, the input has shape {tuple(x.shape)}"
            )
        y = namespace(x).zeros_like(x)
        y[..., list(self.active)] = x[..., list(self.active)]
        return y, None

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return a copy of ``dy``, with zeros for the features that are not active, and None."""
        return self.forward({}, dy)


@explains
@dataclass(frozen=True)
class MLP:
    """Describe a fully connected network, made of the blocks "hidden.0", "hidden.1", ..., "output".

    Inputs are (samples, features). For a classifier targets are integers (samples,), for a regressor numbers (samples,
    outputs); another ``loss`` may take other targets. Inputs of another dtype are cast to ``dtype``.

    Parameters
    ----------
    features : int
        Number of features of a sample.
    hidden : sequence of int
        Widths of the hidden layers; empty gives a linear model.
    outputs : int
        Number of classes; for regression, number of predicted values (:class:`GaussianNLLLoss` takes two for each
        value).
    activation : str
        "gelu", "silu", "relu" or "tanh".
    task : str
        "classification" or "regression".
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the start values.
    active_features : tuple of int or None
        Indices of the features that are used; the others are replaced by zeros, in training too. None uses all.
    loss : str, Loss or None
        "cross_entropy" or "bce" for a classifier, "mse", "l1", "huber", "relative_l2" or "gaussian" for a regressor, or
        an object such as ``HuberLoss(delta=0.5)``. None is "cross_entropy" and "mse". The attribute is the object.

    Raises
    ------
    ConfigError
        A size, name or dtype is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> net = mz.nn.MLP(features=2, hidden=[8], outputs=1, task="regression", activation="tanh")
    >>> list(net.blocks)
    ['hidden.0', 'output']
    >>> x = np.random.default_rng(0).normal(size=(16, 2))
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.DDPModel(net, config, optimizer=mz.Adam(lr=0.05)) as model:
    ...         losses = [model.train(x, x[:, :1] * x[:, 1:]) for step in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    features: int
    hidden: Sequence[int]
    outputs: int
    activation: str = "relu"
    task: str = "classification"
    dtype: Any = "float32"
    seed: int = 0
    active_features: tuple[int, ...] | None = None
    loss: Any = None

    def __post_init__(self) -> None:
        require_positive("MLP", features=self.features, outputs=self.outputs)
        if not isinstance(self.hidden, Iterable) or isinstance(self.hidden, str):
            raise ConfigError(f"MLP: hidden={self.hidden!r} must be the widths of the hidden layers, such as (64, 32)")
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for index, width in enumerate(self.hidden):
            require_positive("MLP", **{f"hidden[{index}]": width})
        named_activation(self.activation)
        if self.task not in TASKS:
            raise ConfigError(f'MLP: task={self.task!r} is not one of "classification", "regression"')
        loss: Loss = loss_for("MLP", self.task, self.loss)
        object.__setattr__(self, "loss", loss)
        require("MLP: seed", self.seed, seed)
        object.__setattr__(self, "dtype", model_dtype("MLP", self.dtype))
        if self.active_features is not None:
            if isinstance(self.active_features, str) or not isinstance(self.active_features, Iterable):
                raise ConfigError(f"MLP: active_features={self.active_features!r} must be a sequence of integers")
            object.__setattr__(self, "active_features", tuple(sorted({int(i) for i in self.active_features})))
            if any(not 0 <= i < self.features for i in self.active_features):
                raise ConfigError(f"MLP: active_features={self.active_features} must lie in 0 to {self.features - 1}")

    @property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in the order in which they run."""
        return self._chain

    @cached_property
    def _chain(self) -> dict[str, Sequential]:
        widths = (self.features, *self.hidden)
        gain = 1.0 if self.activation == "tanh" else 2.0  # He et al., 2015: half of the others' outputs vanish
        blocks = {}
        for i, (inputs, outputs) in enumerate(zip(widths, self.hidden, strict=False)):
            linear = Linear(inputs, outputs, init=Init("normal", (gain / inputs) ** 0.5), input_gradient=i > 0)
            layers = {"linear": linear, "activation": named_activation(self.activation)}
            blocks[f"hidden.{i}"] = Sequential({**self._select(i), **layers})
        init = Init("normal", widths[-1] ** -0.5)
        last = Linear(widths[-1], self.outputs, init=init, input_gradient=bool(self.hidden))
        blocks["output"] = Sequential({**self._select(len(self.hidden)), "linear": last})
        return blocks

    def _select(self, index: int) -> dict[str, Layer]:
        if index > 0 or self.active_features is None:
            return {}
        return {"select": Select(self.features, self.active_features)}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.features,)

    def split(self, group: Group) -> BlockModel:
        """Return the tensor-parallel form: layers are split alternately by columns and by rows.

        So each pair of layers needs one all-reduce in the forward pass and one in the backward pass. If the number of
        layers is odd, the last layer is split by columns and its outputs are gathered. Every rank gets all outputs.
        Hidden features (and the outputs of a last layer that is split by columns) are divided among the ranks by the
        shard rule.
        """
        if group.size == 1:
            return self
        from mpizero.nn.split.linear import ColumnLinear, RowLinear
        from mpizero.nn.split.model import SplitModel

        blocks: dict[str, Layer] = {}
        cuts = {}
        last = len(self.hidden)
        for i, (name, block) in enumerate(self._chain.items()):
            layers = dict(block.children())
            linear: Any = layers["linear"]
            if i % 2:
                layers["linear"] = RowLinear(linear, group)
            elif i < last:
                layers["linear"], cuts[name] = ColumnLinear(linear, group), -1
            else:
                layers["linear"] = linear.split(group)
            blocks[name] = Sequential(layers)
        return SplitModel(self, group, blocks, self.loss, cuts)

    def feature_importance(self, params: Mapping[str, Params]) -> dict[str, float]:
        """Return, for each feature, its share of the first layer's absolute weights.

        This is the mean absolute weight of the feature in the first layer, divided by the sum of these means over all
        features. Features that are not active have 0. Features on different scales are comparable only if the inputs
        were standardized. The returned keys are the features' indices as text: "0", "1", ...
        """
        first = next(iter(self.blocks))
        means = np.abs(np.asarray(params[first]["linear"]["weight"], np.float64)).mean(axis=1)
        used = np.zeros(self.features)
        used[list(self.active_feature_indices)] = 1.0
        means *= used
        return {str(i): float(share) for i, share in enumerate(means / (means.sum() or 1.0))}

    @property
    def active_feature_indices(self) -> tuple[int, ...]:
        """Indices of the features that the model uses."""
        return tuple(range(self.features)) if self.active_features is None else self.active_features

    def with_active_features(self, indices: Sequence[int]) -> MLP:
        """Return a model with the same parameters that uses only the features with the given indices."""
        return replace(self, active_features=tuple(indices))

    def export_computation_graph(self) -> dict[str, Any]:
        """Describe the model as a dict of JSON values; see :func:`mpizero.nn.export_computation_graph`."""
        return export_computation_graph(self, self.sample_shape)

    def compile_predictor(self, params: Mapping[str, Params]) -> Callable[[Array], Array]:
        """Compile a function that computes outputs from samples, and keeps a copy of the parameters.

        Its results equal those of :func:`mpizero.nn.evaluate` within rounding, and it needs no BLAS. It is meant for
        small batches, where one call costs less than the many calls of the layers.
        """
        return compile_mlp(self, params)
