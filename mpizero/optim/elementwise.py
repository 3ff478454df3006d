"""Update parameters element by element: SGD, Adam, AdamW, RMSprop, Lion and LAMB, and wrappers of optimizers.

:class:`FlatOptimizer` is the base class of mpizero's optimizers; a :class:`ParameterGroup` has other settings for some
parameters. SGD, Adam, AdamW and RMSprop are defined as in PyTorch. :func:`adapt` gives a user's own optimizer the same
interface, and :func:`with_copies` adds a moving average of the parameters, or master weights, to an optimizer's state.
:func:`state_specs` tells which arrays of state an optimizer keeps for a parameter. :func:`clip_factor` computes the
factor of clipping by the global norm, and :class:`DynamicLossScale` has the rules of loss scaling.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.checks import flag, fraction, number, positive, require, whole
from mpizero._util.names import as_patterns, check_slots, explains, fits, nearest
from mpizero._util.settings import Settings, many, setting
from mpizero.errors import ArgumentError, ConfigError, NonFiniteError
from mpizero.kernels import jit
from mpizero.kernels.elementary import power
from mpizero.kernels.recording import assign
from mpizero.types import Array, Dtype, LearningRate, ParameterSpec


@explains
@dataclass(frozen=True)
class ParameterGroup:
    """Hold settings for the parameters whose dotted name matches one of the group's patterns.

    If several groups match a parameter, the first one is used.

    Attributes
    ----------
    pattern : str or sequence of str
        Shell patterns, such as ``"blocks.*.norm.*"``, or whole names of parameters.
    lr_scale : float
        Factor by which the learning rate of the optimizer is multiplied.
    weight_decay : float or None
        Weight decay of all matching parameters, including biases. None means the weight decay of the optimizer, which
        applies only to those matching parameters whose ``spec.decay`` is True.

    Examples
    --------
    >>> import mpizero as mz
    >>> head = mz.ParameterGroup("head.*", lr_scale=0.1, weight_decay=0.0)
    >>> head.matches("head.weight"), head.matches("blocks.0.weight")
    (True, False)
    >>> mz.ParameterGroup(["*.bias", "*.norm.*"], weight_decay=0.0).matches("blocks.0.norm.weight")
    True
    >>> mz.AdamW(lr=1e-3, groups=[head]).check_names(["blocks.0.weight", "blocks.0.bias"])
    Traceback (most recent call last):
    mpizero.errors.ConfigError: AdamW: ParameterGroup('head.*') matches no parameter: the parameters are ...
    """

    pattern: str | Sequence[str]
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        owner = f"ParameterGroup({self.pattern!r})"
        if not isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", as_patterns(f"{owner}: pattern", self.pattern))
        if not self.pattern:
            raise ConfigError(f"{owner}: pattern is not allowed; expected a shell pattern for dotted names")
        require(f"{owner}: lr_scale", self.lr_scale, number())
        if self.weight_decay is not None:
            require(f"{owner}: weight_decay", self.weight_decay, number())

    def matches(self, name: str) -> bool:
        """Tell whether one of the group's patterns matches a parameter's name."""
        return any(fits(name, pattern) for pattern in self.patterns)

    @property
    def patterns(self) -> Sequence[str]:
        """The patterns as a sequence, even if :attr:`pattern` is a single string."""
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern


class RowSum(NamedTuple):
    """Describe an averaged gradient that has not been computed yet: rows to add in tree order, and the divisor.

    A row is one partial sum of the gradient. The kernels of :mod:`mpizero.kernels.cpu.update` add the rows, divide the
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


#: Check for a pair of decay rates, each in [0, 1).
DECAY_RATES = many(fraction, count=2)


@explains
@dataclass(frozen=True, kw_only=True)
class FlatOptimizer(Settings):
    """Base class of mpizero's optimizers, which update flat arrays element by element.

    An optimizer has no reference to a model, a rank or a communicator.

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
    weight_decay: float = setting(0.0, number())
    groups: Sequence[ParameterGroup] = ()

    #: True if the update needs the norm of each tensor: then ``direction`` and ``apply_direction`` replace ``apply``.
    needs_tensor_norms: ClassVar[bool] = False
    #: True if a step needs dot products of whole vectors (:class:`mpizero.optim.VectorMethod`).
    needs_vectors: ClassVar[bool] = False
    #: True for a :class:`~mpizero.optim.TensorOptimizer`, which updates whole tensors, each on one rank.
    needs_whole_tensors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if wrong := of_pytorch(self.lr):
            raise ConfigError(f"{owner}: {wrong}")
        if isinstance(self.lr, Iterable) and not isinstance(self.lr, str | np.ndarray):
            raise ConfigError(f"{owner} is given no parameters, since its model has them: mz.{owner}(lr=1e-3)")
        if callable(self.lr):
            _require_schedule(owner, self.lr)
        else:
            require(f"{owner}: lr", self.lr, number())
        if isinstance(self.groups, ParameterGroup | str) or not isinstance(self.groups, Iterable):
            raise ConfigError(f"{owner}: groups is a sequence of ParameterGroup objects, got {self.groups!r}")
        object.__setattr__(self, "groups", tuple(self.groups))
        for group in self.groups:
            if not isinstance(group, ParameterGroup):
                raise ConfigError(f"{owner}: groups holds {group!r}; expected ParameterGroup objects")
        super().__post_init__()

    def reject(self, name: str, message: str) -> ConfigError:
        """Return the error about the wrong setting ``name``; ``message`` says what is wrong, or what is allowed."""
        return ConfigError(f"{type(self).__name__}: {name}={getattr(self, name)!r}: {message}")

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
        """Check that every pattern matches a parameter, and that every group is the first match of a parameter.

        Raises
        ------
        ConfigError
            If a pattern matches none of ``names``, or if earlier groups match all names that a group matches.
        """
        for pattern in (pattern for group in self.groups for pattern in group.patterns):
            if not any(fits(name, pattern) for name in names):
                parts = {f"{name[:end]}.*" for name in names for end, c in enumerate(name) if c == "."}
                listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                raise ConfigError(
                    f"{type(self).__name__}: ParameterGroup({pattern!r}) matches no parameter"
                    f"{nearest(pattern, (*names, *sorted(parts)))}: the parameters are {listed}"
                )
        used = {next((i for i, group in enumerate(self.groups) if group.matches(name)), None) for name in names}
        for i, group in enumerate(self.groups):
            if i not in used:
                raise ConfigError(
                    f"{type(self).__name__}: ParameterGroup({group.pattern!r}) has no effect: all parameters that it "
                    "matches belong to groups before it, of which the first one counts; give it first"
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
        index, decays = divmod(group, 2)
        lr = rate_at(type(self).__name__, self.lr, step - 1) if lr is None else lr
        decay = self.weight_decay if decays else 0.0
        if index < len(self.groups):
            chosen = self.groups[index]
            lr *= chosen.lr_scale
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
        return lr, decay

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters ``w`` and their ``state`` in place with the gradient ``g``, which is not changed.

        All arrays are contiguous, 1-D and of one dtype. ``hyper`` comes from :meth:`hyper`.
        """
        kernel = getattr(kernels.backend(w).update, self._kernel)
        jit.run_range(kernel, (w, g, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Compute the averaged gradient that ``rows`` describes, and update ``w`` and ``state`` with it, in one pass.

        The result has the same bits as the kernel ``tree_sum`` followed by :meth:`apply`.
        """
        kernel = getattr(kernels.backend(w).update, f"{self._kernel}_tree")
        jit.run_range(kernel, (*rows, w, *(state[slot] for slot in self.slots), hyper), 0, w.size, threads)


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
class SGD(FlatOptimizer):
    """Implement gradient descent, optionally with momentum or Nesterov momentum (Sutskever et al. 2013).

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.0.
    momentum, dampening : float
        The momentum array m is updated with the gradient g: ``m = momentum * m + (1 - dampening) * g``, and ``m = g``
        in the first step. With ``momentum = 0`` there is no momentum array.
    nesterov : bool
        Whether to step along ``g + momentum * m`` instead of ``m``. It requires ``momentum > 0`` and ``dampening = 0``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> w, g, sgd = np.array([1.0, 2.0]), np.array([0.5, -0.5]), mz.SGD(lr=0.1)
    >>> sgd.apply(w, g, {}, sgd.hyper(step=1, group=0, dtype=w.dtype))  # as a sharded model does, on its shard
    >>> w
    array([0.95, 2.05])
    >>> mz.SGD(lr=0.1, momentum=0.9, nesterov=True).slots
    ('momentum_buffer',)
    """

    momentum: float = setting(0.0, fraction)
    dampening: float = setting(0.0, fraction)
    nesterov: bool = setting(False, flag)

    def check_combination(self) -> None:
        """Raise ``ConfigError`` for Nesterov or dampening without momentum, and for Nesterov with dampening."""
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise self.reject("nesterov", f"needs {self.named('momentum')} > 0 and {self.named('dampening')} = 0")
        if self.dampening and not self.momentum:
            raise self.reject("dampening", f"needs {self.named('momentum')} > 0")

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the momentum array; no name if :attr:`momentum` is 0, because there is no such array then."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def _kernel(self) -> str:
        return "momentum" if self.momentum else "sgd"

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        if not self.momentum:
            return lr, decay
        keep = 1.0 if step == 1 else 1.0 - self.dampening
        return lr, decay, self.momentum, keep, *((1.0, self.momentum) if self.nesterov else (0.0, 1.0))


@explains
@dataclass(frozen=True, kw_only=True)
class Adam(FlatOptimizer):
    """Implement Adam (Kingma & Ba 2015); ``weight_decay`` times the parameters is added to the gradient.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.0.
    betas : pair of float
        Decay rates, in [0, 1), of the moving averages of the gradient and of the squared gradient.
    eps : float
        Number > 0 that is added to the square root in the denominator.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [4.0], [6.0]])
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> with mz.distribute(line, mz.Adam(lr=0.5), "zero1") as model:
    ...     losses = [model.train(x, y) for _ in range(20)]
    ...     sorted(model.optimizer.state_dict()["state"])
    ['exp_avg', 'exp_avg_sq']
    >>> losses[-1] < losses[0] / 10
    True
    """

    betas: tuple[float, float] = setting((0.9, 0.999), DECAY_RATES)
    eps: float = setting(1e-8, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays that hold the moving averages of the gradient and of the squared gradient."""
        return ("exp_avg", "exp_avg_sq")

    def _averages(self, step: int) -> tuple[tuple[float, ...], float, float]:
        """Return the weights ``(beta1, 1 - beta1, beta2, 1 - beta2)`` and the factors of the bias correction.

        The factors are ``1 / (1 - beta1**step)``, for the average of the gradient, and ``1 / sqrt(1 - beta2**step)``,
        for the root of the average of the squared gradient (paper, section 3).
        """
        beta1, beta2 = self.betas
        rates = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
        return rates, 1.0 / (1.0 - power(beta1, step)), 1.0 / math.sqrt(1.0 - power(beta2, step))

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, lr * first, second, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Implement Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    Before a step, parameters are multiplied by ``1 - lr * weight_decay``.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.01.
    betas, eps
        As in :class:`Adam`.

    Examples
    --------
    >>> import mpizero as mz
    >>> adamw = mz.AdamW(lr=mz.optim.cosine(3e-3, steps=100, warmup=10), weight_decay=0.1)
    >>> adamw.lr(9), adamw.weight_decay
    (0.003, 0.1)
    >>> mz.AdamW(lr=-1.0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: AdamW: lr=-1.0: expected a finite number >= 0
    """

    weight_decay: float = setting(0.01, number())

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return 1.0 - lr * decay, *rates, lr * first, second, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class RMSprop(FlatOptimizer):
    """Implement RMSprop (Tieleman & Hinton 2012), not centred and without momentum.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.01 by default, and ``weight_decay`` 0.0.
    alpha : float
        Decay rate, in [0, 1), of the moving average of the squared gradient.
    eps : float
        Number > 0 that is added to the square root in the denominator.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> rmsprop, w, g = mz.RMSprop(lr=0.1), np.zeros(2), np.array([1.0, -4.0])
    >>> state = {slot: np.zeros(2) for slot in rmsprop.slots}
    >>> rmsprop.apply(w, g, state, rmsprop.hyper(step=1, group=0, dtype=w.dtype))
    >>> w.round(4), state["square_avg"]
    (array([-1.,  1.]), array([0.01, 0.16]))
    """

    lr: LearningRate = field(default=1e-2, kw_only=False)
    alpha: float = setting(0.99, fraction)
    eps: float = setting(1e-8, positive)

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the moving average of the squared gradient."""
        return ("square_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        return lr, decay, self.alpha, 1.0 - self.alpha, self.eps


@explains
@dataclass(frozen=True, kw_only=True)
class Lion(FlatOptimizer):
    """Implement Lion (Chen et al. 2023), with decoupled weight decay.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.0001 by default, and ``weight_decay`` 0.0.
    betas : pair of float
        Weights, in [0, 1), of the moving average m of the gradient g. The step is ``-lr`` times the sign of ``betas[0]
        * m + (1 - betas[0]) * g``; then m becomes ``betas[1] * m + (1 - betas[1]) * g``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> lion, w, g = mz.Lion(lr=0.25), np.zeros(2), np.array([1.0, -40.0])
    >>> state = {slot: np.zeros(2) for slot in lion.slots}
    >>> lion.apply(w, g, state, lion.hyper(step=1, group=0, dtype=w.dtype))
    >>> w  # steps have the size of the learning rate, whatever the gradient's
    array([-0.25,  0.25])
    """

    lr: LearningRate = field(default=1e-4, kw_only=False)
    betas: tuple[float, float] = setting((0.9, 0.99), DECAY_RATES)

    @property
    def slots(self) -> tuple[str, ...]:
        """Name of the array that holds the moving average of the gradient."""
        return ("exp_avg",)

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        beta1, beta2 = self.betas
        return 1.0 - lr * decay, lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 0.0


@explains
@dataclass(frozen=True, kw_only=True)
class LAMB(Adam):
    """Implement LAMB (You et al. 2020): Adam, with steps whose norm is ``lr`` times the norm of the updated tensor.

    LAMB needs the norm of every tensor and the norm of the direction in which it is updated. So a step takes two passes
    over memory: the first computes the directions, the second updates the parameters.

    Attributes
    ----------
    lr, weight_decay, groups
        As in :class:`~mpizero.optim.FlatOptimizer`; ``lr`` is 0.001 by default, and ``weight_decay`` 0.01.
    betas, eps
        As in :class:`Adam`; ``eps`` is 1e-6 by default.

    Examples
    --------
    >>> import mpizero as mz
    >>> lamb = mz.LAMB(lr=0.01)
    >>> lamb.trust_ratio(weight_norm=2.0, direction_norm=0.5)  # the step of this tensor has the norm 0.01 * 2.0
    4.0
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), lamb) as model:
    ...     model.optimizer.wrapped_optimizer is lamb
    True
    """

    eps: float = setting(1e-6, positive)
    weight_decay: float = setting(0.01, number())

    needs_tensor_norms: ClassVar[bool] = True

    def _scalars(self, step: int, lr: float, decay: float) -> Sequence[float]:
        rates, first, second = self._averages(step)
        return decay, *rates, first, second, self.eps, lr

    def direction(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Update the moving averages in ``state`` with the gradient ``g``; overwrite ``g`` with the direction."""
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).update.lamb_direction(w, g, *slots, hyper, 0, w.size)

    def direction_tree(self, rows: RowSum, w: Array, u: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Compute the averaged gradient that ``rows`` describes; update ``state``, and write the direction to ``u``.

        All this takes one pass over memory. ``u`` may be a slice of a row of ``rows``, if it starts at column
        ``rows.first``.
        """
        slots = (state[slot] for slot in self.slots)
        kernels.backend(w).update.lamb_direction_tree(*rows, w, u, *slots, hyper, 0, w.size)

    @staticmethod
    def trust_ratio(weight_norm: float, direction_norm: float) -> float:
        """Return the factor on a tensor's learning rate: ``weight_norm / direction_norm``, or 1 if one of them is 0."""
        return weight_norm / direction_norm if weight_norm > 0.0 and direction_norm > 0.0 else 1.0

    def apply_direction(self, w: Array, u: Array, hyper: Array, ratio: float) -> None:
        """Update a tensor along its direction: ``w -= lr * ratio * u``, with the learning rate ``lr`` of ``hyper``."""
        rate = np.array([float(hyper[-1]) * ratio], hyper.dtype)
        kernels.backend(w).update.lamb_apply(w, u, rate, 0, w.size)

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Raise an error, because LAMB needs the norm of a whole tensor.

        Raises
        ------
        TypeError
            Always. Use ``direction`` and ``apply_direction``.
        """
        raise ArgumentError("LAMB needs per-tensor norms: use direction, trust_ratio and apply_direction")


_PROBE = 48
_STEP = "step"


class AdaptedOptimizer:
    """Apply a user's optimizer, any object with ``update(params, grads, state)``, to the shards that a rank owns.

    ``update`` must change the 1-D array ``params`` in place, element by element. ``state["step"]`` is the number of the
    step, from 1. The other entries of ``state`` are the optimizer's state arrays, each as long as ``params``. If the
    optimizer has an attribute ``slots``, this attribute names the state arrays, and they start at zero. Otherwise, if
    the optimizer has a method ``init_state(size, dtype)``, the method returns a dictionary of the initial state arrays.
    If the optimizer has neither, the first ``update`` must add the arrays to ``state``.

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
        entries: dict[str, Any] = {_STEP: step}
        if step > 1 or self._declared:
            entries.update({slot: state[slot] for slot in self.slots})
        elif hasattr(self.optimizer, "init_state"):
            entries.update(self.optimizer.init_state(w.size, w.dtype))
        self.optimizer.update(w, g, entries)
        self._check_entries(entries, step, w.size)
        for slot in self.slots:
            if entries.get(slot) is not state[slot]:
                state[slot][:] = entries[slot]

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Compute the averaged gradient that ``rows`` describes, then update ``w`` and ``state`` by :meth:`apply`."""
        g = np.empty_like(w)
        values, first, program, divisor = rows
        kernels.backend(w).update.tree_sum(values, first, values, 0, program, divisor, g, 0, w.size)
        self.apply(w, g, state, hyper, threads)

    def _check_entries(self, entries: Mapping[str, Any], step: int, size: int) -> None:
        if entries.get(_STEP) != step:
            raise ArgumentError(
                f"{self.name}: state['step'] is the number of the step (1 is the first) and not to be set"
            )
        for name, value in entries.items():
            if name == _STEP:
                continue
            if name not in self.slots:
                raise ArgumentError(
                    f"{self.name}: state[{name!r}] appeared after the first update; expected {self.slots or 'no state'}"
                )
            if getattr(value, "shape", None) != (size,):
                actual = f"an array of shape {value.shape}" if hasattr(value, "shape") else f"{value!r}"
                raise ArgumentError(
                    f"{self.name}: state[{name!r}] is {actual}; expected an array of shape ({size},). "
                    "A step count is in state['step']"
                )

    def _discover(self) -> tuple[str, ...]:
        """Find the names of the state arrays by ``init_state``, or by one update with a copy of the optimizer."""
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
        full, parts = AdaptedOptimizer.__new__(AdaptedOptimizer), AdaptedOptimizer.__new__(AdaptedOptimizer)
        for trial in (full, parts):
            trial.__dict__.update(self.__dict__, optimizer=self._copy())
        w = rng.standard_normal(_PROBE)
        results = [w.copy(), w.copy()]
        states = [{slot: np.zeros(_PROBE) for slot in self.slots} for _ in results]
        cuts = (slice(0, 5), slice(5, 29), slice(29, _PROBE))
        for step in (1, 2, 3):
            g, hyper = rng.standard_normal(_PROBE), self.hyper(step, 0, np.float64)
            full.apply(results[0], g.copy(), states[0], hyper)
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
    from mpizero.optim.minimizers import VectorMethod

    if isinstance(optimizer, VectorMethod):
        return optimizer
    if isinstance(optimizer, type):
        raise ArgumentError(f"expected an optimizer, got the class {optimizer.__name__}: call it to make one")
    if isinstance(optimizer, tuple) and hasattr(optimizer, "init"):
        raise ArgumentError(
            f"{type(optimizer).__name__} is a transformation of trees of gradients, as optax has them, which cannot be "
            "sharded: take mz.SGD, mz.Adam, mz.AdamW or another of mpizero, whose lr may be a schedule of optax"
        )
    if wrong := of_pytorch(optimizer):
        raise ArgumentError(wrong)
    if not callable(getattr(optimizer, "update", None)):
        raise ArgumentError(
            f"{type(optimizer).__name__} is not a gradient-based optimizer: it has no method "
            "update(params, grads, state)"
        )
    return AdaptedOptimizer(optimizer)


#: The optimizer of mpizero to use in place of one of PyTorch's that is not converted.
_COUNTERPARTS = {"Muon": "mz.Muon", "RMSprop": "mz.RMSprop", "LBFGS": "mz.LBFGS", "Adagrad": "mz.RMSprop"}
#: PyTorch's optimizers that a TorchModel converts: :mod:`mpizero.adapters.torch.optimizers`.
CONVERTED = ("SGD", "Adam", "AdamW")
#: What takes the place of a scheduler.
RATE_OF_STEP = (
    "a rate that changes is a function of the step, lr=mz.optim.cosine(1e-3, steps=1000, warmup=50), "
    "mz.optim.linear or one of your own"
)


def of_pytorch(optimizer: Any) -> str:
    """Return an error text that says what to use in place of a PyTorch optimizer or scheduler; "" for other objects."""
    home, name = type(optimizer).__module__, type(optimizer).__name__
    if home == "torch.optim.lr_scheduler":
        return f"{name} is a scheduler of PyTorch: {RATE_OF_STEP}"
    if not home.startswith("torch.optim"):
        return ""
    if name in CONVERTED:
        return (
            f"torch.optim.{name} is taken with its groups where a model is made of the TorchModel of the module whose "
            f"parameters it has; elsewhere give mz.{name}(lr=..., groups=[mz.ParameterGroup(...)])"
        )
    like = _COUNTERPARTS.get(name, "mz.AdamW, or an object with an elementwise update(params, grads, state)")
    return f"torch.optim.{name} is not converted: give {like}"


def learning_rate(optimizer: Any, step: int) -> float:
    """Return the learning rate of ``step`` (from 0); NaN if the optimizer has no attribute ``lr``."""
    optimizer = getattr(optimizer, "inner", optimizer)  # of one that averages the parameters, too
    source = optimizer.optimizer if isinstance(optimizer, AdaptedOptimizer) else optimizer
    lr = getattr(source, "lr", None)
    return math.nan if lr is None else rate_at(type(source).__name__, lr, step)


def optimizer_name(optimizer: Any) -> str:
    """Return the optimizer's name for checkpoints: its attribute ``name``, or its class name if it has none."""
    return str(getattr(optimizer, "name", type(optimizer).__name__))


def takes_tensor(optimizer: Any, spec: ParameterSpec) -> bool:
    """Tell whether an adapted optimizer updates a parameter, if it is trained at all, as a whole tensor."""
    if not optimizer.needs_whole_tensors or not spec.optimized:
        return False
    return bool(optimizer.takes(replace(spec, name=spec.guest or spec.name)))


def tensor_slots(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the state arrays of whole tensors; () if the optimizer does not update whole tensors."""
    return tuple(optimizer.tensor_slots) if optimizer.needs_whole_tensors else ()


#: Name of the state array that holds the average.
EMA = "ema"


class CopyingOptimizer:
    """Serve as base class of optimizers that run another one, and keep a copy or an average of the parameters.

    The array of this copy or average is part of the optimizer's state, so it is sharded, saved and loaded with this
    state. Before the first update it is set to the parameters. All other attributes are those of ``inner``, the wrapped
    optimizer, as :func:`mpizero.optim.elementwise.adapt` returns it.
    """

    #: Name of the array in the state.
    slot: ClassVar[str]

    def __init__(self, inner: Any) -> None:
        if self.slot in (*inner.slots, *tensor_slots(inner)):
            taken = f"{optimizer_name(inner)} has a state array of this name already; call it otherwise"
            raise ConfigError(f"{self.slot}: {taken}")
        self.inner = inner
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
        """Names of the wrapped optimizer's state arrays, and of the array that this class adds."""
        return (*self.inner.slots, self.slot)

    def hyper(self, step: int, group: int, dtype: Any, lr: float | None = None) -> Array:
        """Return the wrapped optimizer's scalars for the update in ``step`` (from 1)."""
        self._step = step
        scalars: Array = self.inner.hyper(step, group, dtype, lr)
        return scalars

    def _begin(self, w: Array, state: Mapping[str, Array]) -> None:
        if self._step == 1:
            assign(state[self.slot], w)


#: Name of the state array with the parameters that were not rounded, and its name in checkpoints.
MASTER_WEIGHTS = "master_weights"


class MasterWeightOptimizer(CopyingOptimizer):
    """Run an optimizer on *master weights*: copies of the parameters that are not rounded when the parameters are.

    After an update the parameters are copied from the master weights; then the model's parameter store rounds the
    parameters to bfloat16. See Micikevicius et al. 2018, *Mixed precision training*, section 3.1.
    """

    slot = MASTER_WEIGHTS

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update master weights and state from the gradient ``g``; copy the master weights to the parameters ``w``."""
        self._begin(w, state)
        self.inner.apply(state[MASTER_WEIGHTS], g, state, hyper, threads)
        assign(w, state[MASTER_WEIGHTS])

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update master weights and state from the gradient that ``rows`` describes; copy the new weights to ``w``."""
        self._begin(w, state)
        self.inner.apply_tree(rows, state[MASTER_WEIGHTS], state, hyper, threads)
        assign(w, state[MASTER_WEIGHTS])


class AveragingOptimizer(CopyingOptimizer):
    """Run an optimizer, and keep an exponential moving average of the parameters.

    After each update ``average += (1 - decay) * (parameter - average)``. The average begins with the values that the
    parameters have before the first step, as in timm's ``ModelEma``, without bias correction.

    Parameters
    ----------
    inner : optimizer
        The optimizer, as :func:`mpizero.optim.elementwise.adapt` returns it.
    decay : float
        Share, between 0 and 1, of the old average in the new one.
    """

    slot = EMA

    def __init__(self, inner: Any, decay: float) -> None:
        super().__init__(inner)
        self.decay = decay

    def apply(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters, state and average in place from the gradient ``g``."""
        self._begin(w, state)
        self.inner.apply(w, g, state, hyper, threads)
        self.follow(w, state[EMA], threads)

    def apply_tree(self, rows: RowSum, w: Array, state: Mapping[str, Array], hyper: Array, threads: int = 1) -> None:
        """Update parameters, state and average from the gradient that ``rows`` describes (sums not yet added)."""
        self._begin(w, state)
        self.inner.apply_tree(rows, w, state, hyper, threads)
        self.follow(w, state[EMA], threads)

    def direction(self, w: Array, g: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Compute the direction of an update; the caller applies it, and then calls :meth:`follow`."""
        self._begin(w, state)
        self.inner.direction(w, g, state, hyper)

    def direction_tree(self, rows: RowSum, w: Array, u: Array, state: Mapping[str, Array], hyper: Array) -> None:
        """Write the direction of an update from the gradient that ``rows`` describes to ``u``.

        The caller applies the direction to the parameters, and then calls :meth:`follow`.
        """
        self._begin(w, state)
        self.inner.direction_tree(rows, w, u, state, hyper)

    def follow(self, w: Array, average: Array, threads: int = 1) -> None:
        """Move ``average`` towards the updated parameters ``w``."""
        rate = kernels.namespace(w).full(1, 1.0 - self.decay, w.dtype)
        jit.run_range(kernels.backend(w).update.ema, (w, average, rate), 0, w.size, threads)


def with_copies(optimizer: Any, *, ema: float | None, masters: bool) -> Any:
    """Adapt an optimizer, and let it keep a moving average of the parameters, or master weights, if requested.

    With ``masters`` it keeps master weights; otherwise, unless ``ema`` is None, a moving average with the decay
    ``ema``.

    Raises
    ------
    ConfigError
        If ``masters`` is True, and the optimizer does not update each element by itself.
    """
    adapted = adapt(plain(optimizer))
    if masters and (adapted.needs_tensor_norms or adapted.needs_whole_tensors or adapted.needs_vectors):
        raise ConfigError(
            f"wire_parameters=True: {optimizer_name(adapted)} needs whole tensors; give an optimizer that updates each "
            "element by itself, such as AdamW, or leave wire_parameters out"
        )
    if masters:
        return MasterWeightOptimizer(adapted)
    return adapted if ema is None else AveragingOptimizer(adapted, ema)


def plain(optimizer: Any) -> Any:
    """Return the optimizer that a :class:`CopyingOptimizer` runs, or ``optimizer`` itself."""
    return optimizer.inner if isinstance(optimizer, CopyingOptimizer) else optimizer


def state_specs(optimizer: Any, spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """Return the state arrays of a parameter by their names (slots), such as "exp_avg", each described by a spec.

    The specs have the parameter's name.

    ``optimizer`` is one that :func:`mpizero.optim.elementwise.with_copies` returned. A parameter that is not optimized
    has no state arrays.

    Raises
    ------
    ConfigError
        If an optimizer of whole tensors has a state array that its ``tensor_slots`` do not name.
    """
    if not spec.optimized:
        return {}
    if not takes_tensor(optimizer, spec):
        return dict.fromkeys(optimizer.slots, spec)
    shapes = optimizer.state_shapes(spec.shape)
    if unknown := sorted(set(shapes) - set(optimizer.tensor_slots)):
        raise ConfigError(
            f"{optimizer_name(optimizer)}: state_shapes({spec.shape}) has {unknown[0]!r}, which tensor_slots = "
            f"{tuple(optimizer.tensor_slots)} lacks: name it there, too"
        )
    tensor_specs = {slot: replace(spec, shape=tuple(shape), part=None) for slot, shape in shapes.items()}
    return tensor_specs | ({EMA: spec} if EMA in optimizer.slots else {})


def state_size(optimizer: Any, spec: ParameterSpec) -> int:
    """Return the number of elements of all state arrays that belong to a parameter."""
    return sum(array.size for array in state_specs(optimizer, spec).values())


def tensor_state_size(optimizer: Any, spec: ParameterSpec) -> int:
    """Return the number of state elements that the owner of a whole tensor keeps, without the moving average."""
    return sum(array.size for slot, array in state_specs(optimizer, spec).items() if slot not in optimizer.slots)


def clip_factor(norm: float, limit: float) -> float:
    """Compute the factor that clips gradients: 1.0 if ``norm`` is at most ``limit``, otherwise ``limit / norm``.

    ``norm`` is the norm of the whole gradient, over all ranks. (PyTorch divides by ``norm + 1e-6``.)

    Raises
    ------
    ConfigError
        If ``limit`` is not a finite number > 0.
    NonFiniteError
        If ``norm`` is infinite or NaN.
    """
    require("clip: limit", limit, positive)
    if not math.isfinite(norm):
        raise NonFiniteError(f"the global gradient norm is {norm}; such a step must be skipped, not clipped")
    return 1.0 if norm <= limit else limit / norm


@explains
@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Hold the rules by which the loss scale changes (Micikevicius et al. 2018).

    A step is good if all its gradients are finite; otherwise it has overflowed.

    Attributes
    ----------
    initial, smallest, largest : float
        The scale of the first step, and the smallest and the largest scale allowed. Scaling is exact if the scale is a
        power of two.
    growth, backoff : float
        The scale is multiplied by ``growth`` after ``interval`` good steps in a row, and by ``backoff`` after an
        overflow.
    interval : int
        Number of good steps in a row after which the scale grows.

    Examples
    --------
    >>> import mpizero as mz
    >>> state = mz.DynamicLossScale(initial=1024.0, interval=2).start()
    >>> state.after(finite=False).scale  # an overflow: the step is skipped
    512.0
    >>> state.after(finite=True).after(finite=True).scale
    2048.0
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     sharded = mz.ShardedOptimizer(mz.AdamW(), config, loss_scale=mz.DynamicLossScale(initial=1024.0))
    ...     sharded.loss_scale.initial
    1024.0
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require(f"{owner}: smallest", self.smallest, positive)
        require(f"{owner}: largest", self.largest, number(self.smallest))
        require(f"{owner}: initial", self.initial, number(self.smallest))
        if self.initial > self.largest:
            raise ConfigError(f"{owner}: initial={self.initial!r}: expected at most {self.largest!r}")
        require(f"{owner}: growth", self.growth, number(1.0, above=True))
        require(f"{owner}: backoff", self.backoff, number(below=1.0, above=True))
        require(f"{owner}: interval", self.interval, whole(1))

    def start(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(self, self.initial)


@dataclass(frozen=True)
class LossScaleState:
    """Hold the loss scale, and the number of good steps since the last overflow or growth; equal on all ranks."""

    policy: DynamicLossScale
    scale: float
    good_steps: int = 0

    def after(self, *, finite: bool) -> LossScaleState:
        """Return the state after one more step; ``finite`` says whether all gradients of that step were finite."""
        policy = self.policy
        if not finite:
            return replace(self, scale=max(self.scale * policy.backoff, policy.smallest), good_steps=0)
        if self.good_steps + 1 < policy.interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * policy.growth, policy.largest), good_steps=0)
