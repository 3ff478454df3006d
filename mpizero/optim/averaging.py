"""Keep an exponential moving average of the parameters beside the state of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpizero import kernels
from mpizero.errors import ConfigError
from mpizero.kernels import jit
from mpizero.optim.adapted import adapt, optimizer_name, tensor_slots
from mpizero.optim.flat_optimizer import RowSum
from mpizero.types import Array

#: Name of the state array that holds the average.
EMA = "ema"


class AveragingOptimizer:
    """Run an optimizer, and after each update move an average of the parameters towards them.

    After each update ``average += (1 - decay) * (parameter - average)``. The average begins with the values that the
    parameters have before the first step, as in timm's ``ModelEma``, and no bias is corrected. It is one more array of
    the optimizer's state, so it is sharded, saved and loaded with it. Everything else is the optimizer's own.

    Parameters
    ----------
    inner : optimizer
        What :func:`mpizero.optim.adapted.adapt` returns.
    decay : float
        Between 0 and 1.
    """

    def __init__(self, inner: Any, decay: float) -> None:
        if EMA in (*inner.slots, *tensor_slots(inner)):
            raise ConfigError(f"ema: {optimizer_name(inner)} has a state array of this name already; call it otherwise")
        self.inner, self.decay = inner, decay
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for before there is one, by copies
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def name(self) -> str:
        """The optimizer's name in checkpoints."""
        return optimizer_name(self.inner)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's state arrays, and of the average."""
        return (*self.inner.slots, EMA)

    def hyper(self, step: int, group: int, dtype: Any, lr: float | None = None) -> Array:
        """Return the optimizer's scalars for ``step`` (from 1), which the next update makes."""
        self._step = step
        scalars: Array = self.inner.hyper(step, group, dtype, lr)
        return scalars

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters, state and average in place from the gradient ``g``."""
        self._begin(w, state)
        self.inner.apply(w, g, state, hyper, threads)
        self.follow(w, state[EMA], threads)

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters, state and average from the averaged gradient of ``rows``."""
        self._begin(w, state)
        self.inner.apply_tree(rows, w, state, hyper, threads)
        self.follow(w, state[EMA], threads)

    def direction(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Compute the direction of an update; :meth:`follow` is called when it has been applied."""
        self._begin(w, state)
        self.inner.direction(w, g, state, hyper)

    def direction_tree(self, rows: RowSum, w: Array, u: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Compute the direction of an update from ``rows``; :meth:`follow` is called when it has been applied."""
        self._begin(w, state)
        self.inner.direction_tree(rows, w, u, state, hyper)

    def _begin(self, w: Array, state: Mapping[str, Array]) -> None:
        if self._step == 1:
            state[EMA][:] = w

    def follow(self, w: Array, average: Array, threads: int = 1) -> None:
        """Move ``average`` towards the updated parameters ``w``."""
        rate = kernels.namespace(w).full(1, 1.0 - self.decay, w.dtype)
        jit.run_range(kernels.backend(w).optimizer.ema, (w, average, rate), 0, w.size, threads)


def averaging(optimizer: Any, decay: float | None) -> Any:
    """Return the adapted optimizer, which also keeps an average of the parameters unless ``decay`` is None."""
    adapted = adapt(plain(optimizer))
    return adapted if decay is None else AveragingOptimizer(adapted, decay)


def plain(optimizer: Any) -> Any:
    """Return the optimizer that an :class:`AveragingOptimizer` runs, or ``optimizer`` itself."""
    return optimizer.inner if isinstance(optimizer, AveragingOptimizer) else optimizer
