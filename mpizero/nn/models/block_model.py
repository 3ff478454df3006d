"""Work with whole models in one process: make parameters, compute predictions, losses and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpizero._util.checks import unmasked, unmasked_samples
from mpizero._util.pytree import paths_of
from mpizero.errors import ConfigError, LayoutError, UnsupportedError
from mpizero.layout.flat import joined, nested
from mpizero.nn.arrays import namespace
from mpizero.nn.error_location import call_located
from mpizero.nn.graph import FORMAT, Graph, NodeOutput
from mpizero.nn.initialize import start_values_of
from mpizero.nn.integers import fresh_integers, layer_integers, start_integers
from mpizero.nn.layer import Layer
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, BlockModel, ParameterSpec, Params, Run


def model_specs(model: BlockModel) -> tuple[ParameterSpec, ...]:
    """Return the specs of all parameters of a model, in the order of its blocks. Not collective.

    Their names are global: ``<block>.<name in the block>``.

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
        One array for each parameter, by global name, of the shape and dtype that the model declares. Tied uses have
        none. Integer arrays that are not among them get their start values.

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
        block: nest(
            [(spec.name, named[spec.tied or joined(block, spec.name)]) for spec in layer.specs()]
            + [(spec.name, integers[joined(block, spec.name)]) for spec in layer_integers(layer)]
        )
        for block, layer in model.blocks.items()
    }


def nest(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Turn dotted names into nested dictionaries: ``("a.b", 1)`` becomes ``{"a": {"b": 1}}``. Not collective."""
    return nested(dict(items))


def evaluate(model: BlockModel, params: Mapping[str, Params], x: Array, run: Run = EVALUATE) -> Array:
    """Return a model's output, without keeping caches for a backward pass. Collective where the model is split.

    Parameters
    ----------
    model : BlockModel
        The model.
    params : mapping of str to Params
        Nested parameters by block, as :func:`bind` returns them.
    x : Array
        The model's input; the first axis counts samples.
    run : Run
        What layers get besides the input; ``run.training`` turns dropout on.

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


def loss_and_gradients(
    model: BlockModel,
    named: Mapping[str, Array],
    batch: tuple[Array, Array],
    run: Run = EVALUATE,
    scale: float = 1.0,
    slots: Mapping[str, Array] | None = None,
) -> tuple[float, float, dict[str, Array]]:
    """Compute a model's loss and gradients on one batch. Collective where the model is split.

    Parameters
    ----------
    model : BlockModel
        The model.
    named : mapping of str to Array
        Parameters by global name, as :func:`bind` takes them.
    batch : tuple of Array
        Inputs and targets.
    run : Run
        What layers get besides the input; ``run.training`` turns dropout on.
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
        The gradient of ``scale * loss_sum`` for each trainable parameter, by global name; for an averaged parameter its
        new value. It includes the gradients of tied uses. If ``slots`` is given, these are its arrays.

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


def model_operations(model: BlockModel, input_shape: tuple[int, ...]) -> dict[str, Operations]:
    """Count the floating-point operations of each block's matrix products for one sample of ``input_shape``.

    Returns the counts by block name. For a split model they are those of this rank. Not collective.

    Examples
    --------
    >>> import mpizero as mz
    >>> for block, operations in mz.nn.model_operations(mz.nn.MLP(8, [16], 2), (8,)).items():
    ...     print(block, operations.forward, operations.total)
    hidden.0 256 512
    output 64 192
    """
    counts = {}
    for block, layer in model.blocks.items():
        if not isinstance(layer, Layer):
            raise UnsupportedError(
                f"block {block!r} is a {type(layer).__name__}, which does not count its products; "
                "derive it from mpizero.nn.Layer"
            )
        counts[block] = layer.operations(input_shape)
        input_shape = layer.output_shape(input_shape)
    return counts


def export_computation_graph(model: BlockModel, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Describe a model's computation as plain JSON values. Not collective.

    Parameters
    ----------
    model : BlockModel
        The model. A layer made of others must define :meth:`Layer.trace`, which says how they are joined.
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
    for block, layer in model.blocks.items():
        if not isinstance(layer, Layer):
            raise UnsupportedError(
                f"block {block!r} is a {type(layer).__name__}, which does not describe its computation; "
                "derive it from mpizero.nn.Layer"
            )
        node = layer.trace(graph, block, node)
    return {
        "format": FORMAT,
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
    block: str, layer: Any, kept: tuple[Params, Any], dy: Array | None, uses: Mapping[str, Array]
) -> Array | None:
    """Run a block's backward pass into its arrays of ``uses``; ``kept`` are its parameters and its cache."""
    if dy is None:
        raise LayoutError(f"no gradient reaches block {block!r}: the block after it returns none for its input")
    own = ((spec.name, uses[joined(block, spec.name)]) for spec in layer.specs() if spec.trainable)
    grads = nest([*own, *fresh_integers(layer).items()])
    dx: Array | None = call_located("block", block, layer.backward, *kept, dy, grads)
    return dx


def _run_of(model: BlockModel, x: Any, run: Run) -> Run:
    """Return :func:`run_on` after a check that no input of the user's is masked."""
    for path, leaf in paths_of(x=x):
        unmasked_samples(leaf, path)
    return run_on(model, x, run)


def run_on(model: BlockModel, x: Array, run: Run) -> Run:
    """Return ``run`` with the length of the sequences in the input ``x``, if the model needs it; else ``run`` itself.

    Models that need it have a method ``run_on``, as split models do. Collective only for a
    :class:`~mpizero.nn.context.context_forms.ContextModel`.
    """
    know = getattr(model, "run_on", None)
    return run if know is None else know(x, run)


def _require_equal_names(wanted: set[str], given: set[str]) -> None:
    if missing := sorted(wanted - given):
        raise LayoutError(f"parameters are missing: {', '.join(missing[:5])} ({len(missing)} in all)")
    if unknown := sorted(given - wanted):
        raise LayoutError(f"the model has no parameters {', '.join(unknown[:5])} ({len(unknown)} in all)")
