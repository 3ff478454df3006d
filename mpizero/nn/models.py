"""Work with whole models in one process, and define the models of this package: MLP and GPT.

The first functions make a model's parameters (:func:`initial_parameters`, :func:`bind`), and compute predictions,
losses and gradients. :class:`MLP` is a fully connected classifier or regressor, :class:`GPT` a decoder-only transformer
language model (Radford et al., 2019). The method ``compile_predictor`` of both compiles the whole forward pass to one
kernel, which uses no BLAS and calls no layers. :func:`freeze` keeps parameters of a model from being trained, chosen by
patterns of their names; :func:`from_torch` and :func:`to_torch` convert weights of a GPT from and to PyTorch's names
and layout; :func:`efficient_samples` finds the number of samples with which a model's matrix products are about as fast
as the machine can compute them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mpizero._util.checks import require, seed, unmasked, unmasked_samples
from mpizero._util.names import as_patterns, explains, selected
from mpizero._util.pytree import paths_of
from mpizero.errors import ConfigError, DataError, LayoutError, UnsupportedError
from mpizero.layout.flat import joined, nested, value_at
from mpizero.nn.arrays import as_ids, as_rows, namespace, require_numbers, start_values_of
from mpizero.nn.layer import (
    GRAPH_FORMAT,
    Graph,
    Layer,
    NodeOutput,
    Operations,
    call_located,
    fresh_integers,
    layer_integers,
    require_positive,
    require_rate,
    start_integers,
)
from mpizero.nn.layers import Checkpointed, Frozen, FrozenNames, Linear, PartlyFrozen, Sequential, named_activation
from mpizero.nn.losses import TASKS, CrossEntropy, loss_for
from mpizero.nn.transformer import LanguageHead, TokenEmbedding, TransformerBlock
from mpizero.types import EVALUATE, Array, BlockModel, Group, Init, Loss, ParameterSpec, Params, Run


def model_specs(model: BlockModel) -> tuple[ParameterSpec, ...]:
    """Return the specs of all parameters of a model, in the order of its blocks. Not collective.

    The names are global: ``<block>.<name in the block>``.

    Examples
    --------
    >>> import mpizero as mz
    >>> for spec in mz.nn.model_specs(mz.nn.MLP(2, [3], 1)):
    ...     print(spec.name, spec.shape, spec.decay)
    hidden.0.linear.weight (2, 3) True
    hidden.0.linear.bias (3,) False
    output.linear.weight (3, 1) True
    output.linear.bias (1,) False
    """
    return tuple(
        replace(spec, name=joined(block, spec.name)) for block, layer in model.blocks.items() for spec in layer.specs()
    )


def initial_parameters(model: BlockModel) -> dict[str, Array]:
    """Return the start values of a model's parameters by name, as contiguous NumPy arrays.

    A tied use has no array of its own. Not collective.

    Examples
    --------
    >>> import mpizero as mz
    >>> named = mz.nn.initial_parameters(mz.nn.MLP(2, [3], 1, seed=5))
    >>> list(named)
    ['hidden.0.linear.weight', 'hidden.0.linear.bias', 'output.linear.weight', 'output.linear.bias']
    >>> named["output.linear.bias"]
    array([0.], dtype=float32)
    """
    values: dict[str, Array] = {}
    fill = start_values_of(model)
    for spec in model_specs(model):
        if spec.tied is None:
            flat = np.empty(spec.size, model.dtype)
            fill(spec, 0, spec.size, flat)
            values[spec.name] = spec.view(flat)
    return values


def bind(model: BlockModel, named: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """Arrange named parameters as nested dictionaries, which layers take. Not collective.

    Parameters
    ----------
    model : BlockModel
        The model.
    named : mapping of str to Array
        One array for each parameter, by global name, of the shape and dtype that the model declares. A tied use has no
        array. Integer arrays that ``named`` lacks get their start values.

    Returns
    -------
    dict
        The first key is the block's name; the parameter's name within the block is then split at its dots.
        ``bound["blocks.0"]["attention"]["qkv"]["weight"]`` is the array in ``named``, not a copy. A tied use gets the
        array of the parameter that it shares.

    Raises
    ------
    LayoutError
        A parameter is missing, unknown, or of another shape or dtype.

    Examples
    --------
    >>> import mpizero as mz
    >>> model = mz.nn.MLP(2, [3], 1)
    >>> named = mz.nn.initial_parameters(model)
    >>> params = mz.nn.bind(model, named)
    >>> params["output"]["linear"]["weight"] is named["output.linear.weight"]
    True
    """
    wanted = {spec.name: spec for spec in model_specs(model) if spec.tied is None}
    integers = start_integers(model)
    _require_equal_names(set(wanted), named.keys() - integers.keys())
    integers |= {name: named[name] for name in integers.keys() & named.keys()}
    for name, spec in wanted.items():
        array = unmasked(named[name], f"parameter {name!r}")
        wanted_type = spec.element_type(model.dtype)
        if tuple(array.shape) != spec.shape or array.dtype != wanted_type:
            raise LayoutError(
                f"parameter {name} must be {wanted_type} of shape {spec.shape}, "
                f"it is {array.dtype} of shape {tuple(array.shape)}"
            )
    return {
        block: nested(
            {spec.name: named[spec.tied or joined(block, spec.name)] for spec in layer.specs()}
            | {spec.name: integers[joined(block, spec.name)] for spec in layer_integers(layer)}
        )
        for block, layer in model.blocks.items()
    }


def _require_equal_names(wanted: set[str], names: set[str]) -> None:
    if missing := sorted(wanted - names):
        raise LayoutError(f"parameters are missing: {', '.join(missing[:5])} ({len(missing)} in all)")
    if unknown := sorted(names - wanted):
        raise LayoutError(f"the model has no parameters {', '.join(unknown[:5])} ({len(unknown)} in all)")


def evaluate(model: BlockModel, params: Mapping[str, Params], x: Array, run: Run = EVALUATE) -> Array:
    """Return a model's output, without keeping caches for a backward pass. Collective if the model is split.

    Parameters
    ----------
    model : BlockModel
        The model.
    params : mapping of str to Params
        Nested parameters by block, as :func:`bind` returns them.
    x : Array
        The model's input; the first axis counts samples.
    run : Run
        Seed, step and indices of the samples, for the layers; ``run.training`` turns dropout on.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> model = mz.nn.MLP(2, [3], 1)
    >>> params = mz.nn.bind(model, mz.nn.initial_parameters(model))
    >>> mz.nn.evaluate(model, params, np.ones((5, 2))).shape
    (5, 1)
    """
    run = _run_of(model, x, run)
    if without := [block for block, layer in model.blocks.items() if layer.specs() and block not in params]:
        raise LayoutError(
            f"there are no parameters of block {without[0]!r}: evaluate takes what bind(model, named) gives"
        )
    for block, layer in model.blocks.items():
        x = call_located("block", block, layer.forward, params.get(block, {}), x, run)[0]
    return x


def _run_of(model: BlockModel, x: Any, run: Run) -> Run:
    """Check that no input is a masked array, and return the result of :func:`run_on`."""
    for path, leaf in paths_of(x=x):
        unmasked_samples(leaf, path)
    return run_on(model, x, run)


def run_on(model: BlockModel, x: Array, run: Run) -> Run:
    """Return ``run`` with the length of the sequences in the input ``x``, if the model needs it; else ``run`` itself.

    Models that need the length have a method ``run_on``, as split models do. Collective for context-parallel models
    only.
    """
    know = getattr(model, "run_on", None)
    return run if know is None else know(x, run)


def loss_and_gradients(
    model: BlockModel,
    named: Mapping[str, Array],
    batch: tuple[Array, Array],
    run: Run = EVALUATE,
    scale: float = 1.0,
    slots: Mapping[str, Array] | None = None,
) -> tuple[float, float, dict[str, Array]]:
    """Compute a model's loss and gradients on one batch. Collective if the model is split.

    Parameters
    ----------
    model : BlockModel
        The model.
    named : mapping of str to Array
        Parameters by global name, as :func:`bind` takes them.
    batch : tuple of Array
        Inputs and targets.
    run : Run
        Seed, step and indices of the samples, for the layers; ``run.training`` turns dropout on.
    scale : float
        Factor on the gradients.
    slots : mapping of str to Array, optional
        Arrays for the gradients, from :func:`gradient_slots`. A training loop should pass the same arrays in each step;
        otherwise new memory is allocated every time.

    Returns
    -------
    loss_sum, weight : float
        The sum of the losses and their total weight; the ratio is the mean loss.
    gradients : dict of str to Array
        The gradient of ``scale * loss_sum`` for each trainable parameter, summed over all of its uses if it is tied, by
        global name; for an averaged parameter its new value. If ``slots`` is given, the gradients are arrays of
        ``slots``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> model = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")  # y = weight x + bias
    >>> named = {"output.linear.weight": np.array([[2.0]]), "output.linear.bias": np.array([0.0])}
    >>> batch = np.array([[1.0], [2.0]]), np.zeros((2, 1))
    >>> loss_sum, weight, gradients = mz.nn.loss_and_gradients(model, named, batch)
    >>> loss_sum, weight
    (20.0, 2.0)
    >>> gradients["output.linear.weight"]  # the sum of 2 error x
    array([[20.]])
    """
    params = bind(model, named)
    x, target, caches = _forward(model, params, batch, run)
    loss_sum, weight, loss_cache = model.loss.forward(x, target)
    dy: Array | None = model.loss.backward(loss_cache, scale)
    specs = [spec for spec in model_specs(model) if spec.trainable]
    uses = gradient_slots(model, like=x) if slots is None else slots
    for (block, layer), cache in zip(reversed(list(model.blocks.items())), reversed(caches), strict=True):
        dy = _backward(block, layer, (params[block], cache), dy, uses)
    gradients = {spec.name: uses[spec.name] for spec in specs if spec.tied is None}
    for spec in specs:
        if spec.tied in gradients:
            gradients[spec.tied] += uses[spec.name]
    return loss_sum, weight, gradients


def _forward(
    model: BlockModel, params: Mapping[str, Params], batch: tuple[Array, Array], run: Run
) -> tuple[Array, Array, list[Any]]:
    """Run all blocks forward; return the prediction, the target and the blocks' caches."""
    try:
        x, target = batch
    except (TypeError, ValueError):
        raise LayoutError(f"a batch is a pair (x, target), got a {type(batch).__name__}") from None
    run = _run_of(model, x, run)
    caches = []
    for block, layer in model.blocks.items():
        x, cache = call_located("block", block, layer.forward, params[block], x, run)
        caches.append(cache)
    return x, target, caches


def _backward(
    block: str, layer: Any, saved: tuple[Params, Any], dy: Array | None, uses: Mapping[str, Array]
) -> Array | None:
    """Run a block's backward pass, write its parameters' gradients to ``uses``, and return the input's gradient.

    ``uses`` has an array for each trainable use of a parameter, by global name (:func:`gradient_slots`). ``saved`` is
    the block's parameters and cache.
    """
    if dy is None:
        raise LayoutError(f"no gradient reaches block {block!r}: the block after it returns none for its input")
    uses_of_block = {spec.name: uses[joined(block, spec.name)] for spec in layer.specs() if spec.trainable}
    grads = nested(uses_of_block | fresh_integers(layer))
    dx: Array | None = call_located("block", block, layer.backward, *saved, dy, grads)
    return dx


def gradient_slots(model: BlockModel, like: Array | None = None) -> dict[str, Array]:
    """Return an uninitialized gradient array for each trainable use of a parameter, by the use's global name.

    Tied uses have arrays of their own. ``like`` is an array of the library (NumPy or CuPy) that the gradients shall
    belong to; None is NumPy. Not collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> model = mz.nn.MLP(2, [3], 1, task="regression")
    >>> named, slots = mz.nn.initial_parameters(model), mz.nn.gradient_slots(model)
    >>> batch = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)
    >>> for step in range(3):  # gradient descent in the same memory
    ...     loss_sum, weight, gradients = mz.nn.loss_and_gradients(model, named, batch, slots=slots)
    ...     for name, gradient in gradients.items():
    ...         named[name] -= 0.1 / weight * gradient
    >>> gradients["output.linear.bias"] is slots["output.linear.bias"]
    True
    """
    xp = np if like is None else namespace(like)
    slots = (spec for spec in model_specs(model) if spec.trainable)
    return {spec.name: xp.empty(spec.shape, spec.element_type(model.dtype)) for spec in slots}


def _layers_of(model: BlockModel, task: str) -> Iterator[tuple[str, Layer]]:
    """Yield the blocks by name; raise :class:`UnsupportedError`, which names ``task``, if one is no :class:`Layer`."""
    for block, layer in model.blocks.items():
        if not isinstance(layer, Layer):
            raise UnsupportedError(
                f"block {block!r} is a {type(layer).__name__}, which does not {task}; derive it from mpizero.nn.Layer"
            )
        yield block, layer


def model_operations(model: BlockModel, input_shape: tuple[int, ...]) -> dict[str, Operations]:
    """Count the floating-point operations of each block's matrix products for one sample of ``input_shape``.

    Returns the counts by block name. For a split model the counts are those of this rank. Not collective.

    Examples
    --------
    >>> import mpizero as mz
    >>> for block, operations in mz.nn.model_operations(mz.nn.MLP(8, [16], 2), (8,)).items():
    ...     print(block, operations.forward, operations.total)
    hidden.0 256 512
    output 64 192
    """
    counts = {}
    for block, layer in _layers_of(model, "count its products"):
        counts[block] = layer.operations(input_shape)
        input_shape = layer.output_shape(input_shape)
    return counts


def export_computation_graph(model: BlockModel, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Describe a model's computation as plain JSON values. Not collective.

    Parameters
    ----------
    model : BlockModel
        The model. A layer made of other layers must define :meth:`Layer.trace`, which says how these are connected.
    input_shape : tuple of int
        Shape of one sample.

    Returns
    -------
    dict
        ``nodes`` lists the nodes in the order of evaluation. Each has its name, its operation, the names of its inputs,
        the shape of its output, its parameters (for each the global name, the shape and whether it is a tied use) and
        its settings. ``inputs`` and ``outputs`` name the model's inputs and outputs. ``format``, ``model``, ``dtype``
        and ``loss`` are the version of this description, the model's class, its dtype and the class of its loss.

    Examples
    --------
    >>> import mpizero as mz
    >>> graph = mz.nn.export_computation_graph(mz.nn.MLP(8, [16], 2), (8,))
    >>> [(node["name"], node["op"]) for node in graph["nodes"]]
    [('hidden.0.linear', 'Linear'), ('hidden.0.activation', 'ReLU'), ('output.linear', 'Linear')]
    >>> graph["outputs"], graph["loss"]
    (['output.linear'], 'CrossEntropy')
    """
    graph, node = Graph(), NodeOutput("x", input_shape)
    for block, layer in _layers_of(model, "describe its computation"):
        node = layer.trace(graph, block, node)
    return {
        "format": GRAPH_FORMAT,
        "model": type(model).__name__,
        "dtype": str(model.dtype),
        "inputs": [{"name": "x", "shape": ["samples", *input_shape]}],
        "nodes": graph.nodes,
        "outputs": [node.name],
        "loss": type(model.loss).__name__,
    }


def model_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` as a NumPy dtype; raise :class:`ConfigError` unless it is float32 or float64.

    ``where`` is the caller's name in the message.
    """
    for known in (np.dtype(np.float32), np.dtype(np.float64)):
        with contextlib.suppress(TypeError):  # NumPy's answer to names that it does not know
            if np.dtype(dtype) == known:
                return known
    raise ConfigError(f'{where}: dtype={dtype!r} is not supported; choose "float32" or "float64"')


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
        """Return a copy of ``dy``, with zeros for features that are not active, and None, as there are no weights."""
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
        an object such as ``HuberLoss(delta=0.5)``. None is "cross_entropy" for a classifier and "mse" for a regressor.
        The attribute ``loss`` is the object.

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
    ...     with mz.distribute(net, mz.Adam(lr=0.05), "ddp", config=config) as model:
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

    @cached_property
    def blocks(self) -> dict[str, Sequential]:
        """The blocks by name, in the order in which they run."""
        widths = (self.features, *self.hidden)
        gain = 1.0 if self.activation == "tanh" else 2.0  # He et al., 2015: the others about halve the variance
        blocks = {}
        for i, (inputs, outputs) in enumerate(zip(widths, self.hidden, strict=False)):
            linear = Linear(inputs, outputs, init=Init("normal", math.sqrt(gain / inputs)), input_gradient=i > 0)
            layers = {"linear": linear, "activation": named_activation(self.activation)}
            blocks[f"hidden.{i}"] = Sequential({**self._select(i), **layers})
        init = Init("normal", 1.0 / math.sqrt(widths[-1]))
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
        from mpizero.nn.tensor_parallel import ColumnLinear, RowLinear, SplitModel

        blocks: dict[str, Layer] = {}
        cuts = {}
        last = len(self.hidden)
        for i, (name, block) in enumerate(self.blocks.items()):
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

        A share is the mean absolute weight of the feature in the first layer, divided by the sum of these means over
        all features. Features that are not active have 0. Features on different scales are comparable only if the
        inputs were standardized. The returned keys are the features' indices as text: "0", "1", ...
        """
        first = next(iter(self.blocks))
        means = np.abs(np.asarray(params[first]["linear"]["weight"], np.float64)).mean(axis=1)
        used = np.zeros(self.features)
        used[list(self.active_feature_indices)] = 1.0
        means *= used
        return {str(i): float(fraction) for i, fraction in enumerate(means / (means.sum() or 1.0))}

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

        The function's results equal those of :func:`mpizero.nn.evaluate` within rounding, and it needs no BLAS. Use the
        function for small batches, where one kernel call costs less than the calls of all layers.
        """
        return compile_mlp(self, params)


_TOKEN_TABLE = "embedding.token.weight"
#: Each dropout has a number, its site, in the key of its random mask: 0 is the embedding's, then each block has three.
_SITES_PER_BLOCK = 3


@explains
@dataclass(frozen=True)
class GPT:
    """Describe a GPT, made of the blocks "embedding", "blocks.0", ..., "head".

    Inputs are integer ids (samples, length). Targets are ids of the same shape; a target below 0 is ignored.

    Parameters
    ----------
    dim, layers, heads : int
        Number of features, of transformer blocks, and of attention heads (which must divide ``dim``).
    sequence : int
        Greatest length of an input.
    vocabulary : int
        Number of different ids; 256 if ids are the bytes of a text.
    dropout : float
        Rate of every dropout: after the embedding, of attention probabilities, and of both branches of a block.
    tied : bool
        Whether the head uses the embedding's token table as its weight.
    activation_checkpointing : bool
        Whether a transformer block keeps only its input for the backward pass, and computes its other activations
        again.
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the start values.

    Raises
    ------
    ConfigError
        A size, rate or dtype is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> list(gpt.blocks)
    ['embedding', 'blocks.0', 'head']
    >>> ids = np.frombuffer(b"to be, or not to be", np.uint8).astype(int)[np.newaxis, :17]
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.distribute(gpt, mz.AdamW(lr=0.01), "ddp", config=config) as model:
    ...         losses = [model.train(ids[:, :-1], ids[:, 1:]) for step in range(5)]
    >>> losses[-1] < losses[0] < 5.6  # log 256 at the start
    True
    """

    dim: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 256
    dropout: float = 0.0
    tied: bool = True
    activation_checkpointing: bool = False
    dtype: Any = "float32"
    seed: int = 0
    #: Kind of the model: for language models, `mpizero train` prints the perplexity.
    task: ClassVar[str] = "language"

    def __post_init__(self) -> None:
        require_positive("GPT", dim=self.dim, layers=self.layers, heads=self.heads)
        require_positive("GPT", sequence=self.sequence, vocabulary=self.vocabulary)
        require_rate("GPT", self.dropout)
        require("GPT: seed", self.seed, seed)
        object.__setattr__(self, "dtype", model_dtype("GPT", self.dtype))
        self._transformer(0)

    def _transformer(self, index: int) -> TransformerBlock:
        site, residual_scale = 1 + _SITES_PER_BLOCK * index, 1.0 / math.sqrt(2 * self.layers)
        return TransformerBlock(self.dim, self.heads, self.dropout, site, residual_scale)

    def _recomputed(self, block: Layer) -> Layer:
        return Checkpointed(block) if self.activation_checkpointing else block

    @cached_property
    def _ends(self) -> tuple[TokenEmbedding, LanguageHead]:
        embedding = TokenEmbedding(self.vocabulary, self.sequence, self.dim, self.dropout, site=0)
        return embedding, LanguageHead(self.dim, self.vocabulary, _TOKEN_TABLE if self.tied else None)

    @cached_property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in the order in which they run."""
        embedding, head = self._ends
        blocks = {f"blocks.{i}": self._recomputed(self._transformer(i)) for i in range(self.layers)}
        return {"embedding": embedding, **blocks, "head": head}

    @cached_property
    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next token."""
        return CrossEntropy()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the longest sample that the model takes."""
        return (self.sequence,)

    def split(self, group: Group) -> BlockModel:
        """Return the tensor-parallel form: heads, hidden features and vocabulary are split over ``group``.

        Between the blocks a rank holds the activations of its positions of the sequences: (samples, positions of this
        rank, dim). After the head a rank holds the logits of its own vocabulary items: (samples, length, items of this
        rank). No rank holds all logits. Positions, hidden features and vocabulary items are divided among the ranks by
        the shard rule.

        Raises
        ------
        ConfigError
            The group's size does not divide the number of heads.
        """
        if group.size == 1:
            return self
        from mpizero.nn.tensor_parallel import SplitBlock, SplitCrossEntropy, SplitHead, SplitModel, SplitTokenEmbedding

        embedding, head = self._ends
        layers = {f"blocks.{i}": self._recomputed(SplitBlock(self._transformer(i), group)) for i in range(self.layers)}
        first = SplitTokenEmbedding(embedding, group, sequence=True)
        blocks = {"embedding": first, **layers, "head": SplitHead(head, group)}
        cuts = {"embedding": 0, **dict.fromkeys(layers, 0), "head": -1}
        loss = SplitCrossEntropy(self.loss, group, self.vocabulary)
        return SplitModel(self, group, blocks, loss, cuts, self.vocabulary, sequences=True)

    def feature_importance(self, params: Mapping[str, Params]) -> dict[str, float]:
        """Return, for each vocabulary item, its share of the sum of the norms of the token table's rows.

        The share is the Euclidean norm of the item's embedding, divided by the sum of the norms of all items. Items
        that did not occur in training keep the norm of their start values. The returned keys are the items' ids as
        text: "0", "1", ...
        """
        table = np.asarray(params["embedding"]["token"]["weight"], np.float64)
        norms = np.sqrt(np.square(table).sum(axis=1))
        return {str(i): float(fraction) for i, fraction in enumerate(norms / (norms.sum() or 1.0))}

    @property
    def active_feature_indices(self) -> tuple[int, ...]:
        """The ids of all vocabulary items."""
        return tuple(range(self.vocabulary))

    def with_active_features(self, indices: tuple[int, ...]) -> GPT:
        """Raise :class:`UnsupportedError`, because a text may hold any item of the vocabulary."""
        raise UnsupportedError("a GPT cannot ignore vocabulary items: every id of a text takes part in its context")

    def export_computation_graph(self) -> dict[str, Any]:
        """Describe the model as a dict of JSON values; see :func:`mpizero.nn.export_computation_graph`."""
        return export_computation_graph(self, self.sample_shape)

    def compile_predictor(self, params: Mapping[str, Params]) -> Callable[[Array], Array]:
        """Compile a function that computes logits from ids, and keeps a copy of the parameters.

        The function's results equal those of :func:`mpizero.nn.evaluate` within rounding. The function takes ids of any
        length up to ``sequence`` and needs no BLAS. Use the function for small batches, where one kernel call costs
        less than the calls of all layers.
        """
        return compile_gpt(self, params)


@dataclass(frozen=True)
class GPTPredictor:
    """Compute logits from ids (samples, length) by one kernel call; :func:`compile_gpt` makes the object.

    Attributes
    ----------
    sizes : tuple of int
        The model's dim, layers, heads, vocabulary and sequence.
    scalars : Array
        The setting ``eps`` of the norms, and the factor on attention scores.
    packed : Array
        All parameters, one after the other in one flat array.
    """

    sizes: tuple[int, int, int, int, int]
    scalars: Array
    packed: Array

    def __call__(self, x: Array) -> Array:
        """Return the logits (samples, length, vocabulary) of the ids ``x``."""
        from mpizero.kernels import predict

        dim, _, _, vocabulary, sequence = self.sizes
        if x.ndim != 2 or x.shape[1] > sequence:
            raise DataError(f"the predictor: takes ids of shape (samples, length <= {sequence}), not {tuple(x.shape)}")
        ids = as_ids(np.asarray(x), vocabulary, "the predictor")
        length = ids.shape[1]
        out = np.empty((*ids.shape, vocabulary), self.packed.dtype)
        work = np.empty(length * (9 * dim + 1), self.packed.dtype)
        sizes = np.array(self.sizes, np.int64)
        predict.gpt(ids.reshape(-1), length, sizes, self.scalars, self.packed, work, out.reshape(-1))
        return out


@dataclass(frozen=True)
class MLPPredictor:
    """Compute outputs from ``x`` (samples, features) by one kernel call; :func:`compile_mlp` makes the object.

    Attributes
    ----------
    widths : Array
        Number of input features, of features of each hidden layer, and of outputs.
    activation : str
        Name of the activation.
    unused : tuple of int
        Indices of the input features that are replaced by zeros.
    packed : Array
        All parameters, one after the other in one flat array.
    """

    widths: Array
    activation: str
    unused: tuple[int, ...]
    packed: Array

    def __call__(self, x: Array) -> Array:
        """Return the outputs (samples, outputs) of ``x``."""
        from mpizero.kernels import predict

        rows = as_rows(np.asarray(x), int(self.widths[0]), self.packed.dtype, "the predictor")
        if self.unused:
            rows = rows.copy()
            rows[:, list(self.unused)] = 0
        out = np.empty((*x.shape[:-1], int(self.widths[-1])), self.packed.dtype)
        work = np.empty(2 * len(rows) * int(self.widths.max()), self.packed.dtype)
        kind = predict.ACTIVATIONS.index(self.activation)
        predict.mlp(rows.reshape(-1), len(rows), self.widths, kind, self.packed, work, out.reshape(-1))
        return out


def compile_gpt(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    """Return a :class:`GPTPredictor` with a copy of the parameters, and compile its kernel."""
    layers = model.blocks.items()
    *arrays, table = (value_at(params[block], spec.name) for block, layer in layers for spec in layer.specs())
    # The head's weight is stored by vocabulary item; the kernel reads (inputs, outputs), and always adds a bias.
    arrays += [table.T, np.zeros(model.vocabulary)]
    eps = model.blocks["head"].children()["norm"].eps
    scalars = np.array([eps, 1.0 / math.sqrt(model.dim // model.heads)], model.dtype)
    sizes = (model.dim, model.layers, model.heads, model.vocabulary, model.sequence)
    predictor = GPTPredictor(sizes, scalars, _packed(arrays, model.dtype))
    predictor(np.zeros((1, 1), np.int64))  # compiles now, not at the first prediction
    return predictor


def compile_mlp(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    """Return an :class:`MLPPredictor` with a copy of the parameters, and compile its kernel."""
    layers = [params[block]["linear"] for block in model.blocks]
    packed = _packed([array for layer in layers for array in (layer["weight"], layer["bias"])], model.dtype)
    widths = np.array([model.features, *model.hidden, model.outputs], np.int64)
    unused = tuple(sorted(set(range(model.features)) - set(model.active_feature_indices)))
    predictor = MLPPredictor(widths, model.activation, unused, packed)
    predictor(np.zeros((1, model.features), model.dtype))  # compiles now, not at the first prediction
    return predictor


def _packed(arrays: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    return np.concatenate([np.asarray(array, dtype).reshape(-1) for array in arrays])


def freeze(model: Any, patterns: str | Iterable[str]) -> Any:
    """Return a model in which the parameters whose names match one of the patterns are not trained. Not collective.

    Frozen parameters have no gradient and no optimizer state. Other uses of a frozen parameter (tied ones) are frozen,
    too. ``model`` itself is not changed. The returned model has the other attributes and methods of ``model``, too.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model.
    patterns : str or sequence of str
        Shell patterns of parameter names, such as ``["encoder.*", "*.bias"]``; ``*`` matches dots, too.

    Raises
    ------
    ConfigError
        If a pattern matches no parameter, if no parameter is left to train, or if no pattern is given.

    Examples
    --------
    >>> import mpizero as mz
    >>> tuned = mz.nn.freeze(mz.nn.MLP(2, [3], 1), ["hidden.*", "*.bias"])
    >>> [spec.name for spec in mz.nn.model_specs(tuned) if spec.trainable]
    ['output.linear.weight']
    """
    chosen = as_patterns("freeze", patterns)
    if not chosen:
        raise ConfigError('freeze: expected patterns of names, such as ["encoder.*"], got none')
    if isinstance(model, BlockModel):
        trained = {spec.name: spec.trainable and not spec.averaged for spec in model_specs(model) if spec.tied is None}
    elif isinstance(getattr(model, "parameters", None), Mapping):
        untrained = {*getattr(model, "frozen", ()), *getattr(model, "averaged", ())}
        trained = {name: name not in untrained for name in model.parameters}
    else:
        raise ConfigError(f"freeze takes a model of blocks, or one function as a model, got {model!r:.80}")
    names = frozenset(selected(list(trained), "freeze", chosen))
    if not any(trained[name] and name not in names for name in trained):
        raise ConfigError(f"freeze: {', '.join(map(repr, chosen))} leave no parameter to train")
    if callable(with_frozen := getattr(model, "with_frozen", None)):
        model = with_frozen(names)  # a module of another library, which then computes no gradients of them
    return FrozenModel(model, names) if isinstance(model, BlockModel) else FrozenFunction(model, names)


def unfrozen(model: Any) -> Any:
    """Return the model that :func:`freeze` was given, or ``model`` itself. Not collective."""
    return model.model if isinstance(model, FrozenModel | FrozenFunction) else model


@dataclass(frozen=True)
class _Delegate:
    """Delegate attributes to ``model``, unless a subclass defines them; ``names`` are the frozen parameters."""

    model: Any
    names: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("model", "names"):  # copy asks before they are set
            raise AttributeError(name)
        attribute = getattr(self.model, name)
        if name == "with_active_features":
            return lambda indices: replace(self, model=attribute(indices))
        return attribute


@dataclass(frozen=True)
class FrozenFunction(_Delegate):
    """Wrap a functional model (one function) to freeze some of its parameters."""

    @property
    def frozen(self) -> frozenset[str]:
        """The names of all parameters that are not trained."""
        return self.names | frozenset(getattr(self.model, "frozen", ()))


@dataclass(frozen=True)
class FrozenModel(_Delegate):
    """Wrap a model of blocks to freeze some of its parameters."""

    @cached_property
    def blocks(self) -> dict[str, Any]:
        """The blocks by name; those with frozen parameters are wrapped."""
        return _frozen_blocks(self.model.blocks, self.names)

    @property
    def loss(self) -> Any:
        """The model's loss."""
        return self.model.loss

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the model's parameters."""
        dtype: np.dtype[Any] = self.model.dtype
        return dtype

    @property
    def seed(self) -> int:
        """The model's seed."""
        seed: int = self.model.seed
        return seed

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        return self._split if name == "split" else attribute

    def _split(self, group: Any) -> Any:
        from mpizero.nn.tensor_parallel import SplitModel

        inner = self.model.split(group)
        if isinstance(inner, SplitModel):
            return replace(inner, whole=self, blocks=_frozen_blocks(inner.blocks, self.names))
        return replace(self, model=inner)


def _frozen_blocks(blocks: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the blocks, and wrap those that have parameters in ``names``, which are global names."""
    forms: dict[str, Any] = {}
    for block, layer in blocks.items():
        specs = layer.specs()
        keys = tuple(s.name for s in specs if s.trainable and (s.tied or joined(block, s.name)) in names)
        if keys and isinstance(layer, Layer):
            forms[block] = Frozen(layer) if len(keys) == sum(s.trainable for s in specs) else PartlyFrozen(layer, keys)
        else:
            forms[block] = _FrozenBlock(layer, keys) if keys else layer
    return forms


@dataclass(frozen=True)
class _FrozenBlock(FrozenNames):
    """Wrap an object that is no :class:`Layer`, and delegate attributes to it; ``names`` are names in its specs."""

    layer: Any
    names: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("layer", "names"):
            raise AttributeError(name)
        attribute = getattr(self.layer, name)
        return (lambda group: replace(self, layer=attribute(group))) if name in ("split", "context") else attribute


_PREFIX = "transformer."
_LAYERS = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
}
_ENDS = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.projection.weight": "lm_head.weight",
}


def torch_name(name: str) -> str:
    """Translate the name of a GPT's parameter into PyTorch's.

    [Note: names in PyTorch] The names are those of GPT-2's published state dict, which nanoGPT and Hugging Face's
    ``GPT2LMHeadModel`` share. :func:`from_torch` also reads names without the prefix ``transformer.``, as in Hugging
    Face's ``GPT2Model``:

    ============================================  ==========================================
    mpizero                                       PyTorch
    ============================================  ==========================================
    embedding.token.weight                        transformer.wte.weight
    embedding.position.weight                     transformer.wpe.weight
    blocks.I.norm1.weight, .bias                  transformer.h.I.ln_1.weight, .bias
    blocks.I.attention.qkv.weight, .bias          transformer.h.I.attn.c_attn.weight, .bias
    blocks.I.attention.projection.weight, .bias   transformer.h.I.attn.c_proj.weight, .bias
    blocks.I.norm2.weight, .bias                  transformer.h.I.ln_2.weight, .bias
    blocks.I.feed_forward.expand.weight, .bias    transformer.h.I.mlp.c_fc.weight, .bias
    blocks.I.feed_forward.projection.weight,      transformer.h.I.mlp.c_proj.weight, .bias
    .bias
    head.norm.weight, .bias                       transformer.ln_f.weight, .bias
    head.projection.weight (untied models only)   lm_head.weight
    ============================================  ==========================================

    ``torch.nn.Linear`` stores weights as (outputs, inputs), mpizero as (inputs, outputs) (:class:`mpizero.nn.Linear`),
    so the four matrices of a block are transposed. GPT-2's own ``Conv1D`` stores weights as (inputs, outputs). The
    shape of ``c_attn``, which is never square, shows which of the two layouts a state dict has. The tables (``wte``,
    ``wpe``, ``lm_head``) have the same layout everywhere. Causal masks saved as buffers (``attn.bias``,
    ``attn.masked_bias``) are ignored. mpizero's GELU is the tanh form: ``torch.nn.GELU(approximate="tanh")``, GPT-2's
    "gelu_new". A model trained with GELU's exact form gives slightly different logits in mpizero.
    """
    if name in _ENDS:
        return _ENDS[name]
    _, index, rest = name.split(".", 2)
    layer, _, kind = rest.rpartition(".")
    return f"{_PREFIX}h.{index}.{_LAYERS[layer]}.{kind}"


def from_torch(model: GPT, state: Mapping[str, Any]) -> dict[str, Array]:
    """Convert a PyTorch state dict into a GPT's named parameters.

    Parameters
    ----------
    model : GPT
        The model that the parameters are for; values are cast to its dtype.
    state : mapping of str to tensor or array
        A state dict; tensors may lie on any device.

    Returns
    -------
    dict of str to Array
        One contiguous array for each parameter, by global name, as :func:`mpizero.nn.bind` takes them. A tied use has
        no array.

    Raises
    ------
    LayoutError
        An entry of the state dict is missing or has another shape; the message names it.

    Examples
    --------
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> state = mz.nn.to_torch(gpt, mz.nn.initial_parameters(gpt))  # or a PyTorch model's state_dict()
    >>> named = mz.nn.from_torch(gpt, state)
    >>> named["blocks.0.attention.qkv.weight"].shape  # inputs first
    (8, 24)
    """
    prefix = "" if "wte.weight" in state else _PREFIX
    turned = _stores_outputs_first(model, state, prefix)
    named: dict[str, Array] = {}
    for spec in model_specs(model):
        if spec.tied is not None:
            continue
        key = torch_name(spec.name)
        key = prefix + key[len(_PREFIX) :] if key.startswith(_PREFIX) else key
        if key not in state:
            raise LayoutError(f"the state dict has no {key!r}, which {spec.name} comes from")
        value = _as_array(state[key])
        value = value.T if turned and _is_matrix(spec.name) else value
        if value.shape != spec.shape:
            raise LayoutError(f"{key!r} has shape {value.shape} (inputs first), {spec.name} needs {spec.shape}")
        named[spec.name] = np.array(value, model.dtype, order="C")
    return named


def to_torch(model: GPT, named: Mapping[str, Array]) -> dict[str, Array]:
    """Convert a GPT's named parameters to PyTorch's names and the layout of ``torch.nn.Linear``.

    Returns
    -------
    dict of str to Array
        NumPy arrays by PyTorch's names. Apply ``torch.from_numpy`` to each value to get a state dict.
        ``lm_head.weight`` is always included; if the model is tied, it is the same array as ``transformer.wte.weight``.

    Examples
    --------
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> state = mz.nn.to_torch(gpt, mz.nn.initial_parameters(gpt))
    >>> state["transformer.h.0.attn.c_attn.weight"].shape  # outputs first, as torch.nn.Linear has it
    (24, 8)
    """
    state = {}
    for spec in model_specs(model):
        value = np.asarray(named[spec.tied or spec.name])
        state[torch_name(spec.name)] = np.ascontiguousarray(value.T) if _is_matrix(spec.name) else value
    return state


def _is_matrix(name: str) -> bool:
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.startswith("blocks.") and not layer.endswith(("norm1", "norm2"))


def _stores_outputs_first(model: GPT, state: Mapping[str, Any], prefix: str) -> bool:
    key = f"{prefix}h.0.attn.c_attn.weight"
    if key not in state:
        raise LayoutError(f"the state dict has no {key!r}: it is not a GPT-2's, its names are {sorted(state)[:3]}...")
    return tuple(state[key].shape) == (3 * model.dim, model.dim)


def _as_array(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # NumPy has no such type
        value = value.numpy()
    return np.asarray(value)


def efficient_samples(model: Any) -> tuple[int | None, int]:
    """Return the number of samples with which a model is fast, and the number below which it takes hardly less time.

    With the first number the model's matrix products reach about 0.95 of their best rate, and the time of a block's
    Python calls is small beside them. With less than the second, the calls take longer than the products. The numbers
    depend on the model's shapes alone, not on the machine, so that they are the same in every job. All samples are
    assumed to have the greatest length that the model takes. Not collective.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The unsplit model, with an attribute ``sample_shape`` and with blocks that count their operations (see
        :meth:`mpizero.nn.Layer.operations`).

    Returns
    -------
    (int or None, int)
        Numbers of samples, at least 1. None and 1 if the model has no ``sample_shape`` or no blocks, if it has no
        matrix products, or if they cannot be counted.
    """
    try:
        with np.errstate(all="ignore"):  # layers that do not count their products compute with zeros to find them
            return _enough_samples(model)
    except Exception:  # no sample_shape, or code of the user's own: `mpizero plan`, which needs it, says what is wrong
        return None, 1


# A product of (m, k) by (k, n) is fast where none of its three sizes is small. Two of them are a weight's, the third is
# the number of rows: samples, or samples times positions of a sequence. So with as many rows as the weight is wide,
# more rows make the product hardly faster. docs/measurements.md has the rates from which these constants are chosen.

#: Least and greatest number of rows that are enough for a fast product; between them it is the square root of the
#: largest weight's size.
_FEWEST, _MOST = 512, 1024
#: Floating-point operations of a block, forward and backward, beside which the time of its Python calls is small; an
#: eighth of them takes about as long as the calls.
_OPERATIONS = 2**24


def _enough_samples(model: Any) -> tuple[int | None, int]:
    counted = {name: counts.forward for name, counts in model_operations(model, tuple(model.sample_shape)).items()}
    counted = {name: forward for name, forward in counted.items() if forward}
    if not counted:
        return None, 1
    sizes = [int(spec.size) for name in counted for spec in model.blocks[name].specs()]
    forward = math.ceil(sum(counted.values()))
    rows = min(_MOST, max(_FEWEST, math.isqrt(max(sizes, default=0))))
    work = 3 * forward  # backward twice as much; not what is counted, so that a recomputed forward changes nothing
    beside_calls = _quotient(len(counted) * _OPERATIONS, work)
    return max(1, _quotient(rows * 2 * sum(sizes), forward), beside_calls), max(1, beside_calls // 8)


def _quotient(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return int(-(-a // b))
