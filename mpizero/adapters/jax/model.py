"""Define JaxModel, which makes a model of a pytree of parameters and a loss written in JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy, deepcopy
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np

from mpizero._util.checks import require
from mpizero._util.checks import seed as validation_seed
from mpizero._util.names import explains
from mpizero.adapters.function import FunctionModel
from mpizero.adapters.jax.blocks import CompiledLoss, JaxBlock, JaxLoss, StartValues, make_layers, read_blocks
from mpizero.adapters.jax.function import (
    ParameterTree,
    TracedFunction,
    named_leaves,
    real_type,
    require_precision,
    require_threads,
    samples,
)
from mpizero.adapters.user_code import EfficientSamples, PassTimes, PassWork
from mpizero.errors import ConfigError
from mpizero.types import EVALUATE, Array, Run


@explains
class JaxModel:
    """Make a model of parameters and a loss written in JAX.

    JAX differentiates and compiles the loss, once for each number of samples of a grain. JAX computes on the CPU.

    Parameters
    ----------
    parameters : pytree of arrays
        Initial values, all float32 or complex64, or all float64 or complex128, for which JAX needs ``jax_enable_x64``.
        A parameter is named by its path in the tree, with dots: ``dense.kernel``, ``layers.0.weight``.
    loss : callable
        ``loss(parameters, x, y[, key])`` returns the sum of the losses over the samples, or that sum and the samples'
        weight. The weight is the number of samples if it is not returned. If the function takes a ``key``, it is given
        a key of ``jax.random`` in training, and None in ``evaluate``. The key depends on the seed, the step and the
        first sample of the grain, so it is the same on any number of ranks.
    predict : callable or None
        ``predict(parameters, x)`` returns predictions, an array or a pytree of them. A model of blocks takes no
        ``predict``: its prediction is the output of the last block.
    blocks : list or mapping, optional
        The blocks of a model, each a pair ``(init, apply)`` or ``(parameters, apply)``, in the order in which they run:
        a mapping by name, or a list, whose blocks are named "0", "1", ... ZeRO-3 gathers one block at a time, and
        pipelines divide the blocks over stages. ``init(key)`` returns the block's parameters, a pytree;
        ``apply(parameters, x[, key])`` returns its output, an array or a pytree of them. The argument ``parameters`` is
        then None; or it has the parameters of every block, and ``blocks`` has only the functions ``apply``.
        ``loss(prediction, y)`` takes the output of the last block, or is a loss of ``mpizero.nn``. The name of a
        parameter begins with the name of its block.
    seed : int
        Seed of all keys, including those that are passed to ``init``.
    frozen : collection of str
        Names of the parameters that are not trained.

    Raises
    ------
    ConfigError
        If a parameter is no array of floating point numbers, two parameters have the same name, parameters have 64 bits
        but JAX computes in 32, a name in ``frozen`` is unknown, or a function cannot be called with these arguments.

    Notes
    -----
    ``x`` and ``y`` are arrays, or pytrees of them. Arrays wider than the parameters are converted to the parameters'
    precision. On the first samples, loss and gradient are compared with the sums over two parts of the samples. A mean
    in place of a sum, and samples whose results depend on each other, thus raise an error. Each function is traced
    twice, so random numbers of ``numpy.random`` raise one, too. Importing this package before JAX has computed anything
    gives XLA as many threads as ``OMP_NUM_THREADS`` says, or 1.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.adapters.jax import JaxModel  # before JAX computes anything
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> def squares(parameters, x, y):
    ...     return jnp.sum((x @ parameters["weight"] + parameters["bias"] - y) ** 2)
    >>> model = JaxModel({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)}, squares)
    >>> x = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(8, 1)
    >>> with mz.distribute(model, mz.SGD(lr=0.2)) as placed:
    ...     losses = [placed.train(x, 3 * x + 1) for _ in range(40)]
    ...     {name: float(value.round(2).item()) for name, value in placed.named_parameters().items()}
    {'bias': 1.0, 'weight': 3.0}
    """

    def __init__(
        self,
        parameters: Any,
        loss: Callable[..., Any],
        *,
        predict: Callable[..., Any] | None = None,
        blocks: Any = None,
        seed: int = 0,
        frozen: Collection[str] = (),
    ) -> None:
        self.seed = require("seed", seed, validation_seed)
        #: Times the first passes; those of a model of blocks are not timed.
        self.times = PassTimes()
        if isinstance(frozen, str):
            raise ConfigError(f"JaxModel: frozen is a collection of names, got one string: give [{frozen!r}]")
        if blocks is None:
            self._be_function(parameters, loss, predict, frozen)
        elif predict is not None:
            raise ConfigError("JaxModel: a model of blocks predicts the output of its last block: leave predict out")
        else:
            self._be_blocks(parameters, loss, blocks, frozen)

    def _be_function(
        self, parameters: Any, loss: Callable[..., Any], predict: Callable[..., Any] | None, frozen: Collection[str]
    ) -> None:
        """Set the attributes of a model whose loss is one function of all parameters."""
        tree, leaves = named_leaves(parameters, "JaxModel: parameters")
        arrays = dict(zip(tree.names, map(np.asarray, leaves), strict=True))
        require_precision({name: array.dtype for name, array in arrays.items()}, "JaxModel: parameters")
        function = TracedFunction(loss, "loss", "parameters", "x", "y")
        dtype = real_type(next(iter(arrays.values())).dtype)
        self._compiled = CompiledLoss(function, tree, frozenset(frozen), dtype)
        self.times = self._compiled.times
        #: Computes from the lowered loss with how many samples a grain's fixed cost is small.
        self.efficient_samples = EfficientSamples(
            lambda x, y: _work(self._compiled.lowered(arrays, x, y)), sum(array.size for array in arrays.values())
        )
        made = FunctionModel(
            arrays,
            _Called(self._compiled.loss_and_grad, function),
            loss=_Called(self._compiled.loss_alone, function),
            predict=None if predict is None else _predictor(predict, tree, dtype),
            frozen=frozen,
            seed=self.seed,
        )
        vars(self).update(vars(made))
        #: Whether random numbers depend on where the grains begin, so that other grains give other sums.
        self.random_by_grain = function.takes_key

    def _be_blocks(self, parameters: Any, loss: Any, blocks: Any, frozen: Collection[str]) -> None:
        """Set the attributes of a model of blocks."""
        read = read_blocks(parameters, blocks)
        start = StartValues(read, self.seed)
        self.blocks, self.dtype = make_layers(read, start, frozenset(frozen))
        self.efficient_samples = EfficientSamples(
            lambda x, y: _work_of_blocks(self.blocks, self.dtype, x),
            sum(int(spec.size) for block in self.blocks.values() for spec in block.parameters),
        )
        require_precision(dict.fromkeys(start, self.dtype), "JaxModel: parameters")
        self.loss = loss
        if not callable(getattr(loss, "forward", None)):
            self.loss = JaxLoss(loss, self.dtype)
        self.start_values = start
        self.random_by_grain = any(block.apply.takes_key for block in read.values())

    @property
    def compilations(self) -> int:
        """Number of compilations of the gradient: one per number of samples and, with blocks, per distinct block."""
        if not hasattr(self, "blocks"):
            return self._compiled.compilations
        return sum(each.compilations for each in {id(b.compiled): b.compiled for b in self.blocks.values()}.values())

    def set_sharding_config(self, config: Any) -> None:
        """Raise ``ConfigError`` if ``config.device`` is not the CPU, or XLA has more threads than ``config.threads``.

        Not collective.
        """
        if config.device != "cpu":
            raise ConfigError(
                f"device={config.device!r}: a model written in JAX computes where JAX does, on a GPU if JAX finds one, "
                'and takes arrays of the host: train it with device = "cpu"'
            )
        require_threads(config.threads)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that has its own start values, and shares the compiled functions."""
        twin: Any = copy(self)
        if not hasattr(self, "blocks"):
            twin.parameters = MappingProxyType(deepcopy(dict(twin.parameters), memo))
        result: Self = twin
        return result


class _Called:
    """Call a method as :class:`FunctionModel` calls functions; error messages name the user's function."""

    def __init__(self, method: Callable[..., Any], function: TracedFunction) -> None:
        self._method = method
        self.__wrapped__ = function.function  # error messages name it, and ranks compare it
        self.__signature__ = inspect.signature(method)

    def __call__(self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE) -> Any:
        """Return what the method returns for these arguments."""
        return self._method(parameters, batch, run)


def _predictor(predict: Callable[..., Any], tree: ParameterTree, dtype: np.dtype[Any]) -> Callable[..., Any]:
    function = TracedFunction(predict, "predict", "parameters", "x")

    def predicted(parameters: Mapping[str, Array], x: Any) -> Any:
        with function.traced(without_key=True):
            output = compiled([parameters[name] for name in tree.names], samples(x, dtype, "x"))
            return jax.tree_util.tree_map(np.array, output)  # a copy, which can be written to

    compiled = jax.jit(lambda leaves, x: function(tree.build(leaves), x, key=None))
    return predicted


def _work_of_blocks(blocks: Mapping[str, JaxBlock], dtype: np.dtype[Any], x: Any) -> PassWork:
    """Return the work of a forward and backward pass of blocks, whose parameters have type ``dtype``."""
    inputs, work = samples(x, dtype, "x"), PassWork()
    kinds = (dtype, np.result_type(dtype, np.complex64))
    for block in blocks.values():
        shapes = [jax.ShapeDtypeStruct(spec.shape, kinds[spec.complex]) for spec in block.parameters]
        lowered = block.compiled.lowered(shapes, inputs)
        work = work.plus(PassWork(*(3 * number for number in _work(lowered))))  # backward twice as much
        inputs = jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info)
    return work


def _work(lowered: Any) -> PassWork:
    """Return the operations and bytes of a lowered program. XLA fuses kernels, so their calls are not counted."""
    cost = lowered.cost_analysis()
    return PassWork(operations=int(cost.get("flops", 0)), bytes=int(cost.get("bytes accessed", 0)))
