"""Make layers and a loss of a model of blocks from functions written in JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import jax
import numpy as np

from mpizero.adapters.jax.compiled_block import CompiledBlock, Kept
from mpizero.adapters.jax.loss_checks import CheckedGrains, check_grain, sum_and_weight
from mpizero.adapters.jax.parameter_tree import count, host_view, samples
from mpizero.adapters.jax.random_key import key_data
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.errors import UnsupportedError
from mpizero.nn.layer import Layer, Operations
from mpizero.types import EVALUATE, Array, ParameterSpec, Params, Run


@dataclass(frozen=True, eq=False)
class JaxBlock(Layer):
    """Apply a user's function ``apply(parameters, x[, key])`` as a block.

    Parameters
    ----------
    apply : callable
        The function.
    parameters : tuple of ParameterSpec
        The block's parameters, in the order of JAX.
    number : int
        Number of the block in the model; its random keys depend on it.
    """

    apply: Callable[..., Any]
    parameters: tuple[ParameterSpec, ...]
    number: int
    dtype: np.dtype[Any]
    _compiled: CompiledBlock = field(repr=False)
    #: Whose memory the arrays of a pass are in, which the planner cannot count.
    memory_of: ClassVar[str] = "JAX"

    @property
    def compiled(self) -> CompiledBlock:
        """The compiled functions, which blocks of one function and equal shapes share."""
        return self._compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the block itself, which holds no values."""
        return self

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters."""
        return self.parameters

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Kept]:
        """Return the output for ``x``, and what the backward pass needs; no parameter is in it.

        The output is a read-only array, or a tree of them.
        """
        given = samples(x, self.dtype, "the input")
        if not run.training:
            return self._compiled.output(self._leaves(params), given)
        key = key_data(run, self.number) if self._compiled.apply.takes_key else None
        return self._compiled.forward(self._leaves(params), given, key)

    def backward_input(self, params: Params, cache: Kept, dy: Any) -> tuple[Any, list[Any]]:
        """Return the gradient of the input, None for the first block and for integers, and intermediate results."""
        return self._compiled.backward_input(self._leaves(params), cache, dy)

    def backward_weights(self, params: Params, cache: Kept, pending: list[Any], grads: Params) -> None:
        """Overwrite the gradients of the parameters."""
        found = iter(self._compiled.backward_weights(self._leaves(params), cache, pending))
        for spec in self.parameters:
            if spec.trainable:
                _at(grads, spec.name)[...] = next(found)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output for one sample of ``shape``; that of the input where it cannot be traced."""
        for dtype in (self.dtype, np.dtype(np.int32)):
            try:
                given = [jax.ShapeDtypeStruct(spec.shape, self.dtype) for spec in self.parameters]
                found = self._compiled.traced_output(given, jax.ShapeDtypeStruct((1, *shape), dtype))
                return tuple(found.shape[1:])
            except Exception:  # of the user's function, for an input that it does not take
                continue
        return shape

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Raise ``UnsupportedError``: the operations of a function of JAX are not counted."""
        raise UnsupportedError("a block written in JAX does not count its operations")

    def _leaves(self, params: Params) -> list[Array]:
        return [_at(params, spec.name) for spec in self.parameters]


@dataclass(frozen=True, eq=False)
class JaxLoss:
    """Compute a user's loss ``loss(prediction, y)``, and its gradient."""

    loss: Callable[..., Any]
    dtype: np.dtype[Any]
    _traced: TracedFunction = field(repr=False)
    _checked: CheckedGrains = field(default_factory=CheckedGrains, init=False, repr=False)
    _gradient: Callable[..., Any] = field(init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the loss itself, which holds no values."""
        return self

    def __post_init__(self) -> None:
        gradient = jax.jit(jax.value_and_grad(self._value, has_aux=True, allow_int=True))
        object.__setattr__(self, "_gradient", gradient)

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses, the weight, and the gradient of the sum."""
        y = samples(target, self.dtype, "y")
        with self._traced.traced():
            if not self._checked.enough:
                given: dict[str, Any] = {"parameters": (), "batch": (prediction, y)}
                check_grain(self._checked, self._traced, self._value, self._gradient, **given)
            (loss, weight), gradient = self._gradient(prediction, y)
        return float(loss), float(count(y) if weight is None else weight), gradient

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        """Return ``scale`` times the gradient of the loss sum, in the structure of the prediction."""

        def scaled(leaf: Any) -> Any:
            if leaf.dtype == jax.dtypes.float0:
                return None
            values = host_view(leaf)
            return values if scale == 1.0 else values * values.dtype.type(scale)

        return jax.tree_util.tree_map(scaled, cache)

    def _value(self, prediction: Any, y: Any) -> tuple[Any, Any]:
        return sum_and_weight(self._traced, self._traced(prediction, y, key=None))


def _at(tree: Params, name: str) -> Any:
    found: Any = tree
    for part in name.split("."):
        found = found[part]
    return found
