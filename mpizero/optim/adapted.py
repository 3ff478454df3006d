"""Give a user's own optimizer the interface of mpizero's optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.names import check_slots
from mpizero.errors import ArgumentError
from mpizero.optim.flat_optimizer import FlatOptimizer, RowSum, rate_at
from mpizero.types import Array, Dtype, ParameterSpec

_PROBE = 48
_STEP = "step"


class AdaptedOptimizer:
    """Apply a user's optimizer, any object with ``update(params, grads, state)``, to the shards that a rank owns.

    ``update`` must change the 1-D array ``params`` in place, element by element. ``state["step"]`` is the number of the
    step, from 1. The other entries of ``state`` are the optimizer's state arrays, each as long as ``params``. If the
    optimizer has an attribute ``slots``, this attribute names the state arrays, and they start at zero. Otherwise, if
    the optimizer has a method ``init_state(size, dtype)``, the method returns a dictionary of the initial state arrays.
    If it has neither, the first ``update`` must add the arrays to ``state``.

    Parameters
    ----------
    optimizer : object
        The user's optimizer.
    """

    needs_tensor_norms = False
    needs_vectors = False
    needs_whole_tensors = False
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
        """Return an array that holds only ``step`` (from 1); the user's optimizer has its own learning rate."""
        return np.array([step], np.int64)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters ``w`` and ``state`` in place by the user's ``update`` with the gradient ``g``.

        Raises
        ------
        TypeError
            If ``update`` has changed ``state["step"]``, added an entry that ``slots`` does not name, or set an
            entry to anything but an array as long as ``w``.
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
        """Compute the averaged gradient that ``rows`` describes, then update ``w`` and ``state`` by :meth:`apply`."""
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
        """Return the names of the state arrays, found by ``init_state`` or one update by a copy of the optimizer."""
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
        """Check over three steps that updating an array slice by slice gives the same bits as updating it whole.

        The check is needed because a rank updates its shards one by one. An ``update`` that mixes elements, or counts
        its own calls, would give results that depend on the shards.

        Raises
        ------
        ArgumentError
            If the bits differ.
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

    An optimizer of mpizero is returned itself. Any other object must have ``update(params, grads, state)`` and is
    wrapped in an :class:`AdaptedOptimizer`.

    Raises
    ------
    TypeError
        If the object has no method ``update``, or its ``update`` is not elementwise. The message says which.
    ConfigError
        If a state array of the optimizer has a name that a checkpoint cannot store.
    """
    adapted = _adapted(optimizer)
    check_slots(type(optimizer).__name__, (*adapted.slots, *tensor_slots(adapted)))
    return adapted


def _adapted(optimizer: Any) -> Any:
    if isinstance(optimizer, FlatOptimizer | AdaptedOptimizer):
        return optimizer
    from mpizero.optim.vectors.method import VectorMethod

    if isinstance(optimizer, VectorMethod):
        return optimizer
    if isinstance(optimizer, type):
        raise ArgumentError(f"expected an optimizer, got the class {optimizer.__name__}: call it to make one")
    if isinstance(optimizer, tuple) and hasattr(optimizer, "init"):
        raise ArgumentError(
            f"{type(optimizer).__name__} is a transformation of trees of gradients, as optax has them, which cannot be "
            "sharded: take mz.SGD, mz.Adam, mz.AdamW or another of mpizero, whose lr may be a schedule of optax"
        )
    if not callable(getattr(optimizer, "update", None)):
        raise ArgumentError(
            f"{type(optimizer).__name__} is not a gradient-based optimizer: it has no method "
            "update(params, grads, state)"
        )
    return AdaptedOptimizer(optimizer)


def learning_rate(optimizer: Any, step: int) -> float:
    """Return the learning rate of ``step`` (from 0); NaN for a user's optimizer that has no attribute ``lr``."""
    optimizer = getattr(optimizer, "inner", optimizer)  # of one that averages the parameters, too
    source = optimizer.optimizer if isinstance(optimizer, AdaptedOptimizer) else optimizer
    lr = getattr(source, "lr", None)
    return math.nan if lr is None else rate_at(type(source).__name__, lr, step)


def optimizer_name(optimizer: Any) -> str:
    """Return the optimizer's name for checkpoints: its attribute ``name``, or its class name if it has none."""
    return str(getattr(optimizer, "name", type(optimizer).__name__))


def takes_whole(optimizer: Any, spec: ParameterSpec) -> bool:
    """Tell whether an adapted optimizer updates a parameter as a whole tensor; False for one that is not trained."""
    if not optimizer.needs_whole_tensors or not spec.optimized:
        return False
    return bool(optimizer.takes(replace(spec, name=spec.guest or spec.name)))


def tensor_slots(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the state arrays that whole tensors have; of other adapted optimizers ()."""
    return tuple(optimizer.tensor_slots) if optimizer.needs_whole_tensors else ()
