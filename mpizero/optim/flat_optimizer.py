"""Define what the library's optimizers share: groups, scalars of a step, and kernels over flat arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.errors import ConfigError
from mpizero.kernels import pool
from mpizero.names import explains, nearest
from mpizero.types import Array, Dtype, LearningRate, ParameterSpec
from mpizero.validation import number, require


@explains
@dataclass(frozen=True)
class ParameterGroup:
    """Hold settings for the parameters whose dotted name matches a pattern; the first matching group counts.

    Attributes
    ----------
    pattern : str
        Shell pattern, ``"blocks.*.norm.*"``, or a whole name.
    lr_scale : float
        Factor on the learning rate.
    weight_decay : float or None
        Decay of all matching parameters, biases too. None: the optimizer's, where the parameter takes any.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        owner = f"ParameterGroup({self.pattern!r})"
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError(f"{owner}: pattern is not allowed; expected a shell pattern for dotted names")
        require(f"{owner}: lr_scale", self.lr_scale, number())
        if self.weight_decay is not None:
            require(f"{owner}: weight_decay", self.weight_decay, number())

    def matches(self, name: str) -> bool:
        """Tell whether the group is for the parameter of this name."""
        return self.pattern == name or fnmatchcase(name, self.pattern)


class RowSum(NamedTuple):
    """Describe a sum of rows of gradients, divided; see :mod:`mpizero.kernels.cpu.fused`.

    Attributes
    ----------
    rows : Array
        The rows, (number, columns).
    first : int
        Column of the first element.
    program : Array
        Tree program of the sum, int32.
    divisor : Array
        What the sum is divided by, 1 element.
    """

    rows: Array
    first: int
    program: Array
    divisor: Array


def _require_schedule(owner: str, lr: Callable[..., Any]) -> None:
    """Raise :class:`ConfigError` if a schedule cannot be called with the number of a step alone."""
    try:
        inspect.signature(lr).bind(0)
    except TypeError as error:
        raise ConfigError(f"{owner}: lr is called as lr(step), which this function does not take: {error}") from None
    except ValueError:  # a function of C that does not tell what it takes
        return


def rate_at(owner: str, lr: LearningRate, step: int) -> float:
    """Return the learning rate of ``step`` (0 is the first).

    Raises
    ------
    ConfigError
        A schedule returned something that is no learning rate; names the step.
    """
    return require(f"{owner}: lr({step})", lr(step), number()) if callable(lr) else float(lr)


@explains
@dataclass(frozen=True, kw_only=True)
class FlatOptimizer:
    """Update flat arrays elementwise; an optimizer never sees a model, a rank or a communicator.

    Attributes
    ----------
    lr : float or callable
        Learning rate, or ``schedule(step) -> float`` with 0 for the first step.
    weight_decay : float
        For parameters whose spec takes decay: not biases, norms and embeddings.
    groups : sequence of ParameterGroup
        Exceptions, by name.
    """

    lr: LearningRate = field(default=1e-3, kw_only=False)
    weight_decay: float = 0.0
    groups: Sequence[ParameterGroup] = ()

    #: Whether ``direction`` and ``apply_direction`` with per-tensor norms take the place of ``apply``.
    needs_tensor_norms: ClassVar[bool] = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if callable(self.lr):
            _require_schedule(owner, self.lr)
        else:
            require(f"{owner}: lr", self.lr, number())
        require(f"{owner}: weight_decay", self.weight_decay, number())
        if isinstance(self.groups, ParameterGroup | str) or not isinstance(self.groups, Iterable):
            raise ConfigError(f"{owner}: groups is a sequence of ParameterGroup objects, got {self.groups!r}")
        object.__setattr__(self, "groups", tuple(self.groups))
        for group in self.groups:
            if not isinstance(group, ParameterGroup):
                raise ConfigError(f"{owner}: groups holds {group!r}; expected ParameterGroup objects")
        self._check(owner)

    def _check(self, owner: str) -> None:
        """Check the settings of the subclass."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, each as long as the parameters, zero before the first step."""
        return ()

    @property
    def elementwise_kernel(self) -> bool:
        """True if ``apply_tree`` can sum gradients and update in one pass."""
        return not self.needs_tensor_norms

    @property
    def _kernel(self) -> str:
        return type(self).__name__.lower()

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        raise NotImplementedError(type(self).__name__)

    def group_of(self, spec: ParameterSpec) -> int:
        """Return the number of the group of a parameter: parameters of equal number share a ``hyper``."""
        matches = (i for i, group in enumerate(self.groups) if group.matches(spec.name))
        return 2 * next(matches, len(self.groups)) + int(spec.decay)

    def check_groups(self, names: Sequence[str]) -> None:
        """Check that every group is for some of a model's parameters.

        Raises
        ------
        ConfigError
            If a pattern matches none of ``names``.
        """
        for group in self.groups:
            if not any(map(group.matches, names)):
                parts = {f"{name[:place]}.*" for name in names for place, c in enumerate(name) if c == "."}
                shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                raise ConfigError(
                    f"{type(self).__name__}: ParameterGroup({group.pattern!r}) matches no parameter"
                    f"{nearest(group.pattern, (*names, *sorted(parts)))}: the parameters are {shown}"
                )

    def hyper(self, step: int, group: int, dtype: Dtype, lr: float | None = None) -> Array:
        """Return the kernel's scalars for ``step`` (1 is the first), formed in float64 and rounded to ``dtype`` once.

        ``lr`` is the learning rate of that step where it is known already; a schedule is asked for it
        otherwise.

        Raises
        ------
        ConfigError
            The schedule gives no usable learning rate.
        """
        place, decays = divmod(group, 2)
        lr = rate_at(type(self).__name__, self.lr, step - 1) if lr is None else lr
        decay = self.weight_decay if decays else 0.0
        if place < len(self.groups):
            chosen = self.groups[place]
            lr *= chosen.lr_scale
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
        return np.array(self._scalars(step, lr, decay), dtype)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update ``w`` and ``state`` in place; ``g`` is left as it is. All are contiguous, 1-D, of one dtype."""
        kernel = getattr(kernels.backend(w).optimizer, self._kernel)
        pool.run(kernel, (w, g, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Sum rows of gradients, divide, and update, in one pass over memory.

        Has the bits of ``fused.tree_sum`` followed by :meth:`apply`.
        """
        kernel = getattr(kernels.backend(w).fused, f"{self._kernel}_tree")
        pool.run(kernel, (*rows, w, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)
