"""Compile a user's loss and its gradient, once for each number of samples, and check the loss on its first samples."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Self

import jax
import numpy as np

from mpizero.adapters.grain_cost import PassTimes
from mpizero.adapters.jax.loss_checks import CheckedGrains, check_grain, sum_and_weight
from mpizero.adapters.jax.parameter_tree import ParameterTree, count, descending, host_view, samples
from mpizero.adapters.jax.random_key import key_data, make_key
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.types import EVALUATE, Array, Run

#: Most seconds of a first pass, which compiles, after which a pass of a single sample is compiled to be timed.
_MOST_COMPILING = 2.0


class CompiledLoss:
    """Compute a user's loss of all parameters, with its gradient or without.

    Parameters
    ----------
    loss : TracedFunction
        ``loss(parameters, x, y[, key])``.
    tree : ParameterTree
        Structure and names of the parameters.
    frozen : frozenset of str
        Names of the parameters that are not differentiated.
    dtype : dtype
        Type of the parameters, to which wider samples are converted.
    """

    def __init__(self, loss: TracedFunction, tree: ParameterTree, frozen: frozenset[str], dtype: np.dtype[Any]) -> None:
        self.loss, self._tree, self._dtype = loss, tree, dtype
        self._trained = [name for name in tree.names if name not in frozen]
        self._fixed = [name for name in tree.names if name in frozen]
        self._gradient = jax.jit(self._with_gradient)
        self._forward = jax.jit(self._value)
        self._checked = CheckedGrains()
        #: How often the loss with its gradient was traced and compiled.
        self.compilations = 0
        #: Times the first passes.
        self.times = PassTimes()
        self._alone = jax.jit(jax.value_and_grad(self._value, has_aux=True))  # for passes of no effect
        self._compiled_in = 0.0

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE
    ) -> tuple[float, Mapping[str, Array], float]:
        """Return the sum of the losses, its gradient by name, and the weight; the arrays are read-only."""
        start, (x, y) = perf_counter(), self._samples(batch)
        trained, fixed, key = self._part(parameters, self._trained), self._part(parameters, self._fixed), None
        if self.loss.takes_key and run.training:
            key = key_data(run, 0)
        with self.loss.traced(without_key=key is None):
            if not self._checked.enough:
                given: dict[str, Any] = {"parameters": (trained, fixed), "batch": (x, y), "key": (key,)}
                check_grain(self._checked, self.loss, self._value, self._alone, **given)
            (loss, weight), gradients = self._gradient(trained, fixed, x, y, key)
        found = {name: host_view(gradients[name]) for name in self._trained}
        total, seconds = float(loss), perf_counter() - start
        self._compiled_in = self._compiled_in or seconds
        if run.training and self.times.timed(0, run.count, seconds) and self._compiled_in < _MOST_COMPILING:
            self._time_one(trained, fixed, *jax.tree_util.tree_map(lambda leaf: leaf[:1], (x, y)), key)
        return total, found, _weight(weight, batch, run)

    def _time_one(self, *arguments: Any) -> None:
        """Time a pass of a single sample, which has no effect; the first time after one that compiles it."""
        if self.times.first:
            jax.block_until_ready(self._alone(*arguments))
        start = perf_counter()
        jax.block_until_ready(self._alone(*arguments))
        self.times.one_timed(0, perf_counter() - start)

    def loss_alone(
        self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE
    ) -> tuple[float, float]:
        """Return the sum of the losses and the weight."""
        x, y = self._samples(batch)
        trained, fixed = self._part(parameters, self._trained), self._part(parameters, self._fixed)
        key = key_data(run, 0) if self.loss.takes_key and run.training else None
        with self.loss.traced(without_key=key is None):
            loss, weight = self._forward(trained, fixed, x, y, key)
        return float(loss), _weight(weight, batch, run)

    def lowered(self, parameters: Mapping[str, Array], x: Any, y: Any) -> Any:
        """Return the loss with its gradient as JAX lowers it, before XLA compiles it. Not collective.

        Only shapes and types of the arguments count.
        """
        key = key_data(Run(True, 0, 0, 0), 0) if self.loss.takes_key else None
        trained, fixed = self._part(parameters, self._trained), self._part(parameters, self._fixed)
        return self._alone.lower(trained, fixed, *self._samples((x, y)), key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself, which every copy of the model can use."""
        return self

    def _samples(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return samples(batch[0], self._dtype, "x"), samples(batch[1], self._dtype, "y")

    @staticmethod
    def _part(parameters: Mapping[str, Array], names: list[str]) -> dict[str, Array]:
        return {name: parameters[name] for name in names}

    def _with_gradient(self, *arguments: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        self.compilations += 1
        found, gradients = jax.value_and_grad(self._value, has_aux=True)(*arguments)
        return found, {name: descending(gradient) for name, gradient in gradients.items()}

    def _value(self, trained: dict[str, Any], fixed: dict[str, Any], x: Any, y: Any, key: Any) -> tuple[Any, Any]:
        every = {**trained, **fixed}
        parameters = self._tree.build([every[name] for name in self._tree.names])
        return sum_and_weight(self.loss, self.loss(parameters, x, y, key=make_key(key)))


def _weight(weight: Any, batch: tuple[Any, Any], run: Run) -> float:
    return float(run.count or count(*batch)) if weight is None else float(weight)
