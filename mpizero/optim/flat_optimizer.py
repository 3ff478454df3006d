"""Define the base class of mpizero's optimizers, and its parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.checks import number, require
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError
from mpizero.kernels import jit
from mpizero.types import Array, Dtype, LearningRate, ParameterSpec


@explains
@dataclass(frozen=True)
class ParameterGroup:
    """Hold settings for the parameters whose dotted name matches a pattern.

    If several groups match a parameter, the first one is used.

    Attributes
    ----------
    pattern : str
        Shell pattern, such as ``"blocks.*.norm.*"``, or the whole name of a parameter.
    lr_scale : float
        Factor by which the learning rate of the optimizer is multiplied.
    weight_decay : float or None
        Weight decay of all matching parameters, including biases. None means the weight decay of the optimizer, for
        matching parameters with ``spec.decay`` only.

    Examples
    --------
    >>> import mpizero as mz
    >>> head = mz.ParameterGroup("head.*", lr_scale=0.1, weight_decay=0.0)
    >>> head.matches("head.weight"), head.matches("blocks.0.weight")
    (True, False)
    >>> mz.AdamW(lr=1e-3, groups=[head]).check_names(["blocks.0.weight", "blocks.0.bias"])
    Traceback (most recent call last):
    mpizero.errors.ConfigError: AdamW: ParameterGroup('head.*') matches no parameter: the parameters are ...
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
        """Tell whether the group's pattern matches a parameter's name."""
        return self.pattern == name or fnmatchcase(name, self.pattern)


class RowSum(NamedTuple):
    """Describe an averaged gradient that has not been computed yet: rows to add in tree order, and the divisor.

    A row is one partial sum of the gradient. The kernels of :mod:`mpizero.kernels.cpu.fused` add the rows, divide the
    sum and update the parameters in one pass over memory.

    Attributes
    ----------
    rows : Array
        The rows to add, of shape (number of rows, columns).
    first : int
        Index of the column that belongs to the first element of the parameters to update.
    program : Array
        The order of the additions, an int32 array of instructions (:mod:`mpizero.layout.sum_tree`).
    divisor : Array
        Array of one element, the number by which the sum is divided.
    """

    rows: Array
    first: int
    program: Array
    divisor: Array


def _require_schedule(owner: str, lr: Callable[..., Any]) -> None:
    """Raise :class:`ConfigError` if a learning-rate schedule cannot be called with one argument, the step number.

    ``owner`` names the optimizer in the message.
    """
    try:
        inspect.signature(lr).bind(0)
    except TypeError as error:
        raise ConfigError(f"{owner}: lr is called as lr(step), which this function does not take: {error}") from None
    except ValueError:  # a function of C that does not tell what it takes
        return


def rate_at(owner: str, lr: LearningRate, step: int) -> float:
    """Return the learning rate ``lr``, or the value of the schedule ``lr`` for ``step`` (from 0).

    ``owner`` names the optimizer in error messages.

    Raises
    ------
    ConfigError
        If the schedule returned a value that is no finite number >= 0. The message names the step.
    """
    if not callable(lr):
        return float(lr)
    value: Any = lr(step)
    if getattr(value, "shape", None) == ():  # an array of another library, such as those of optax's schedules
        value = value.item()
    return require(f"{owner}: lr({step})", value, number())


@explains
@dataclass(frozen=True, kw_only=True)
class FlatOptimizer:
    """Base class of mpizero's optimizers, which update flat arrays element by element.

    An optimizer knows no model, rank or communicator.

    Attributes
    ----------
    lr : float or callable
        Learning rate, or a schedule: a function that returns the learning rate of a step, counted from 0.
    weight_decay : float
        Weight decay of the parameters with ``spec.decay``, which is False for biases, norms and embeddings.
    groups : sequence of ParameterGroup
        Other settings for the parameters whose names match the pattern of a group.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> adam = mz.Adam(lr=0.1)
    >>> isinstance(adam, mz.optim.FlatOptimizer), adam.slots
    (True, ('exp_avg', 'exp_avg_sq'))
    >>> w, g, state = np.zeros(3), np.array([1.0, -2.0, 0.0]), {slot: np.zeros(3) for slot in adam.slots}
    >>> adam.apply(w, g, state, adam.hyper(step=1, group=0, dtype=w.dtype))
    >>> w.round(4)
    array([-0.1,  0.1,  0. ])
    """

    lr: LearningRate = field(default=1e-3, kw_only=False)
    weight_decay: float = 0.0
    groups: Sequence[ParameterGroup] = ()

    #: True if the update needs the norm of each tensor: then ``direction`` and ``apply_direction`` replace ``apply``.
    needs_tensor_norms: ClassVar[bool] = False
    #: True if a step needs dot products of whole vectors (:class:`mpizero.optim.VectorMethod`).
    needs_vectors: ClassVar[bool] = False
    #: True for a :class:`~mpizero.optim.TensorOptimizer`, which updates whole tensors, each on one rank.
    needs_whole_tensors: ClassVar[bool] = False

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
        """Check the settings that a subclass adds; raise :class:`ConfigError` if one is wrong."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, which are as long as the parameters and zero before the first step."""
        return ()

    @property
    def elementwise_kernel(self) -> bool:
        """True if ``apply_tree`` can sum gradients and update the parameters in one pass over memory."""
        return not self.needs_tensor_norms

    @property
    def _kernel(self) -> str:
        return type(self).__name__.lower()

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        raise NotImplementedError(type(self).__name__)

    def group_of(self, spec: ParameterSpec) -> int:
        """Return the number of a parameter's group, for :meth:`hyper`.

        Parameters have the same number if the same entry of :attr:`groups` and the same ``spec.decay`` apply to them.
        """
        matches = (i for i, group in enumerate(self.groups) if group.matches(spec.name))
        return 2 * next(matches, len(self.groups)) + int(spec.decay)

    def check_names(self, names: Sequence[str]) -> None:
        """Check that the pattern of every group matches at least one parameter of a model.

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
        """Return the array of scalars that the update kernel needs in ``step`` (from 1) for one group of parameters.

        The scalars, such as learning rate and weight decay, are computed in float64 and rounded to ``dtype`` once.
        ``group`` is a number from :meth:`group_of`. ``lr`` is the learning rate of the step; None means :attr:`lr`.

        Raises
        ------
        ConfigError
            If the schedule returned a value that is no finite number >= 0.
        """
        return np.array(self._scalars(step, *self._rates(step, group, lr)), dtype)

    def _rates(self, step: int, group: int, lr: float | None) -> tuple[float, float]:
        """Return learning rate and weight decay of a group's parameters; the arguments are those of :meth:`hyper`."""
        place, decays = divmod(group, 2)
        lr = rate_at(type(self).__name__, self.lr, step - 1) if lr is None else lr
        decay = self.weight_decay if decays else 0.0
        if place < len(self.groups):
            chosen = self.groups[place]
            lr *= chosen.lr_scale
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
        return lr, decay

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters ``w`` and their ``state`` in place with the gradient ``g``, which is not changed.

        All arrays are contiguous, 1-D and of one dtype. ``hyper`` comes from :meth:`hyper`.
        """
        kernel = getattr(kernels.backend(w).optimizer, self._kernel)
        jit.run_range(kernel, (w, g, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Compute the averaged gradient of ``rows``, and update ``w`` and ``state`` with it, in one pass over memory.

        The result has the same bits as ``fused.tree_sum`` followed by :meth:`apply`.
        """
        kernel = getattr(kernels.backend(w).fused, f"{self._kernel}_tree")
        jit.run_range(kernel, (*rows, w, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)
