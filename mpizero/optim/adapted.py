"""Give a user's own optimizer the interface of mpizero's optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.errors import ArgumentError
from mpizero.names import check_slots
from mpizero.optim.flat_optimizer import FlatOptimizer, RowSum, rate_at
from mpizero.types import Array, Dtype, ParameterSpec

_PROBE = 48
_STEP = "step"


class AdaptedOptimizer:
    """Run a user's optimizer, any object with ``update(params, grads, state)``, on the shards that a rank owns.

    ``update`` works in place on 1-D arrays and must be elementwise. ``state["step"]`` is the number of the step (1 is
    the first). The other entries of ``state`` are the optimizer's own arrays, as long as ``params``. If the optimizer
    has an attribute ``slots``, the arrays named there start at zero. If it has a method
    ``init_state(size, dtype) -> dict``, the arrays start as returned. With neither, the first update makes them.

    Parameters
    ----------
    optimizer : object
        The user's optimizer.
    """

    needs_tensor_norms = False
    elementwise_kernel = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self._declared = hasattr(optimizer, "slots")
        self.slots: tuple[str, ...] = tuple(optimizer.slots) if self._declared else self._discover()
        self._verify_elementwise()

    def group_of(self, spec: ParameterSpec) -> int:
        """Return 0, because all parameters are in the same group."""
        return 0

    def hyper(self, step: int, group: int, dtype: Dtype, lr: float | None = None) -> Array:
        """Return an array with the number of the step (1 is the first); the learning rate is the user's own matter."""
        return np.array([step], np.int64)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update ``w`` and ``state`` in place.

        Raises
        ------
        TypeError
            A value in the optimizer's state is not an array as long as the parameters.
        """
        step = int(hyper[0])
        given: dict[str, Any] = {_STEP: step}
        if step > 1 or self._declared:
            given.update({slot: state[slot] for slot in self.slots})
        elif hasattr(self.optimizer, "init_state"):
            given.update(self.optimizer.init_state(w.size, w.dtype))
        self.optimizer.update(w, g, given)
        self._check_entries(given, step, w.size)
        for slot in self.slots:
            if given.get(slot) is not state[slot]:
                state[slot][:] = given[slot]

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Sum rows of gradients in tree order, divide the sum, and update ``w`` with it, in two passes over memory."""
        g = np.empty_like(w)
        values, first, program, divisor = rows
        kernels.backend(w).fused.tree_sum(values, first, values, 0, program, divisor, g, 0, w.size)
        self.apply(w, g, state, hyper, threads)

    def _check_entries(self, given: Mapping[str, Any], step: int, size: int) -> None:
        if given.get(_STEP) != step:
            raise ArgumentError(
                f"{self.name}: state['step'] is the number of the step (1 is the first) and not to be set"
            )
        for name, value in given.items():
            if name == _STEP:
                continue
            if name not in self.slots:
                raise ArgumentError(
                    f"{self.name}: state[{name!r}] appeared after the first update; expected {self.slots or 'no state'}"
                )
            if getattr(value, "shape", None) != (size,):
                found = f"an array of shape {value.shape}" if hasattr(value, "shape") else f"{value!r}"
                raise ArgumentError(
                    f"{self.name}: state[{name!r}] is {found}; expected an array of shape ({size},). "
                    "A step count is in state['step']"
                )

    def _discover(self) -> tuple[str, ...]:
        """Find the names of the optimizer's state arrays by one update of a copy on small arrays."""
        if hasattr(self.optimizer, "init_state"):
            return tuple(self.optimizer.init_state(0, np.dtype(np.float64)))
        state: dict[str, Any] = {_STEP: 1}
        self._copy().update(np.ones(_PROBE), np.ones(_PROBE), state)
        self.slots = tuple(name for name in state if name != _STEP)
        self._check_entries(state, 1, _PROBE)
        return self.slots

    def _copy(self) -> Any:
        try:
            return copy.deepcopy(self.optimizer)
        except Exception as error:
            raise ArgumentError(
                f"{self.name}: cannot be copied ({error}), so it cannot be tried on sample data"
            ) from error

    def _verify_elementwise(self) -> None:
        """Raise an error unless updating an array in parts gives the same bits as updating it whole, over three steps.

        A rank updates its shards one by one. An ``update`` that mixes elements, or counts its own calls, would give
        other results there.
        """
        rng = np.random.default_rng(0)
        whole, parts = AdaptedOptimizer.__new__(AdaptedOptimizer), AdaptedOptimizer.__new__(AdaptedOptimizer)
        for trial in (whole, parts):
            trial.__dict__.update(self.__dict__, optimizer=self._copy())
        w = rng.standard_normal(_PROBE)
        results = [w.copy(), w.copy()]
        states = [{slot: np.zeros(_PROBE) for slot in self.slots} for _ in results]
        cuts = (slice(0, 5), slice(5, 29), slice(29, _PROBE))
        for step in (1, 2, 3):
            g, hyper = rng.standard_normal(_PROBE), self.hyper(step, 0, np.float64)
            whole.apply(results[0], g.copy(), states[0], hyper)
            for cut in cuts:
                parts.apply(results[1][cut], g[cut].copy(), {k: a[cut] for k, a in states[1].items()}, hyper)
        if not np.array_equal(results[0], results[1], equal_nan=True):
            raise ArgumentError(
                f"{self.name}.update is not elementwise: updating a part of the parameters gives other values than "
                "updating all of them. Norms and means over all elements cannot be sharded this way; for a step "
                "count use state['step'], not a counter of calls"
            )


def adapt(optimizer: Any) -> Any:
    """Return an optimizer with the interface of :class:`mpizero.optim.FlatOptimizer`.

    mpizero's own optimizers are returned as they are. Any other object needs ``update(params, grads, state)``.

    Raises
    ------
    TypeError
        The object has no method ``update``, or its ``update`` is not elementwise; the message says which.
    ConfigError
        One of its state arrays has a name that a checkpoint cannot hold.
    """
    adapted = _adapted(optimizer)
    check_slots(type(optimizer).__name__, adapted.slots)
    return adapted


def _adapted(optimizer: Any) -> Any:
    if isinstance(optimizer, (FlatOptimizer, AdaptedOptimizer)):
        return optimizer
    if isinstance(optimizer, type):
        raise ArgumentError(f"expected an optimizer, got the class {optimizer.__name__}: call it to make one")
    if not callable(getattr(optimizer, "update", None)):
        raise ArgumentError(
            f"{type(optimizer).__name__} is not a gradient-based optimizer: it has no method "
            "update(params, grads, state)"
        )
    return AdaptedOptimizer(optimizer)


def learning_rate(optimizer: Any, step: int) -> float:
    """Return the learning rate of ``step`` (0 is the first); NaN for a user's optimizer without ``lr``."""
    source = optimizer.optimizer if isinstance(optimizer, AdaptedOptimizer) else optimizer
    lr = getattr(source, "lr", None)
    return math.nan if lr is None else rate_at(type(source).__name__, lr, step)
