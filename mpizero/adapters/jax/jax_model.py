"""Define JaxModel, which makes a model of a pytree of parameters and a loss written in JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import jax
import numpy as np

from mpizero.adapters.function import FunctionModel
from mpizero.adapters.jax.compiled_loss import CompiledLoss
from mpizero.adapters.jax.parameter_tree import ParameterTree, named_leaves, require_precision, samples, to_numpy
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.adapters.jax.xla_threads import require_threads
from mpizero.names import explains
from mpizero.types import EVALUATE, Array, Run


class JaxModel:
    """Make a model of parameters and a loss written in JAX.

    JAX differentiates and compiles the loss, once for each number of samples of a grain. It computes on the CPU.

    Parameters
    ----------
    parameters : pytree of arrays
        Initial values, all of 32 bits or all of 64 bits; for 64 bits JAX needs ``jax_enable_x64``. A parameter is named
        by its path in the tree, with dots: ``dense.kernel``, ``layers.0.weight``.
    loss : callable
        ``loss(parameters, x, y[, key])`` returns the sum of the losses over the samples, or that sum and the samples'
        weight. The weight is the number of samples if it is not returned. If the function takes a ``key``, it is given
        a key of ``jax.random`` in training, and None in ``evaluate``. The key depends on the seed, the step and the
        first sample of the grain, so it is the same on any number of ranks.
    predict : callable or None
        ``predict(parameters, x)`` returns predictions, an array or a pytree of them.
    seed : int
        Seed of the keys.
    frozen : collection of str
        Names of the parameters that are not trained.

    Raises
    ------
    ConfigError
        If a parameter is no array of floating point numbers, two have one name, 64 bits are given and JAX has 32, a
        name in ``frozen`` is unknown, or a function cannot be called with these arguments.

    Notes
    -----
    ``x`` and ``y`` are arrays, or pytrees of them. Arrays wider than the parameters are converted to their precision.
    On the first samples, the loss is compared with that of their two halves, and traced twice: a mean in place of a
    sum, samples that see each other, and random numbers of ``numpy.random`` raise an error. Importing this package
    before JAX has computed anything gives XLA as many threads as ``OMP_NUM_THREADS`` says, or 1.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Return an object of the class that the arguments ask for."""
        kind: Any = JaxFunctionModel if cls is JaxModel else cls
        made: Self = object.__new__(kind)
        return made

    def set_sharding_config(self, config: Any) -> None:
        """Raise ``ConfigError`` if XLA computes with more threads than ``config.threads``. Not collective."""
        require_threads(config.threads)


@explains
class JaxFunctionModel(FunctionModel, JaxModel):
    """Hold a model that is one loss of all parameters; see :class:`JaxModel`."""

    def __init__(
        self,
        parameters: Any,
        loss: Callable[..., Any],
        *,
        predict: Callable[..., Any] | None = None,
        seed: int = 0,
        frozen: Collection[str] = (),
    ) -> None:
        tree, leaves = named_leaves(parameters, "JaxModel: parameters")
        arrays = dict(zip(tree.names, map(np.asarray, leaves), strict=True))
        require_precision({name: array.dtype for name, array in arrays.items()}, "JaxModel: parameters")
        function = TracedFunction(loss, "loss", "parameters", "x", "y")
        dtype = np.dtype(np.finfo(next(iter(arrays.values())).dtype).dtype)
        self._compiled = CompiledLoss(function, tree, frozenset(frozen), dtype)
        super().__init__(
            arrays,
            _Called(self._compiled.loss_and_grad, function),
            loss=_Called(self._compiled.loss_alone, function),
            predict=None if predict is None else _predictor(predict, tree, dtype),
            frozen=frozen,
            seed=seed,
        )
        #: Whether random numbers depend on where the grains begin, so that sums over other pieces differ.
        self.random_by_grain = function.takes_key

    @property
    def compilations(self) -> int:
        """Number of times that the loss with its gradient was compiled: once for each number of samples of a grain."""
        return self._compiled.compilations


class _Called:
    """Call a method with the arguments of a black box, in the name of the user's function."""

    def __init__(self, method: Callable[..., Any], function: TracedFunction) -> None:
        self._method = method
        self.__wrapped__ = function.function  # error messages name it, and ranks compare it
        self.__signature__ = inspect.signature(method)

    def __call__(self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE) -> Any:
        """Return what the method returns."""
        return self._method(parameters, batch, run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself, whose compiled functions every copy of the model can use."""
        return self


def _predictor(predict: Callable[..., Any], tree: ParameterTree, dtype: np.dtype[Any]) -> Callable[..., Any]:
    function = TracedFunction(predict, "predict", "parameters", "x")

    def predicted(parameters: Mapping[str, Array], x: Any) -> Any:
        with function.traced(without_key=True):
            return to_numpy(compiled([parameters[name] for name in tree.names], samples(x, dtype, "x")))

    compiled = jax.jit(lambda leaves, x: function(tree.build(leaves), x, key=None))
    return predicted
