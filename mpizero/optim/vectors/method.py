"""Define the base class of methods that look at the whole vector of parameters, and the progress of such a method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from mpizero._util.checks import number, require
from mpizero.optim.vectors.bounds import Bounds
from mpizero.optim.vectors.diagonal import Diagonal
from mpizero.optim.vectors.line_search import LineSearch
from mpizero.optim.vectors.regularization import Regularization
from mpizero.optim.vectors.space import TRIAL, VectorSpace
from mpizero.types import Array, Dtype, ParameterSpec

#: State arrays of every method: the parameters of the last iterate, their gradient, and the direction of the search.
POINT, GRADIENT, DIRECTION = "point", "gradient", "direction"

#: So many iterations that lower neither the loss nor the gradient end a method.
_STALLS = 5
Stage = Literal["first", "search", "product", "done"]


@dataclass
class MethodProgress:
    """Hold what a method knows besides its vectors; the same on all ranks.

    Attributes
    ----------
    stage : str
        What the next evaluation is for: "first" is that of the start values, "search" one of the line search, and
        "product" one for a product with the Hessian. "done" if no further evaluation is wanted.
    iterations, evaluations : int
        How many there have been.
    loss, norm : float
        Loss and largest magnitude of the gradient at the last iterate.
    least_norm, stalls : float and int
        The smallest such magnitude so far, and how many of the last iterates have lowered neither it nor the loss.
    converged : bool
        Whether the method has ended because it has converged.
    message : str
        Why the method has ended.
    along, step : str and float
        The next evaluation is at ``POINT`` plus ``step`` times the vector of this name; "" at first.
    search : LineSearch or None
        The state of the line search, of methods that have one.
    numbers : dict of str to list of float
        Further scalars of a method.
    """

    stage: Stage = "first"
    iterations: int = 0
    evaluations: int = 0
    loss: float = 0.0
    norm: float = 0.0
    least_norm: float = 0.0
    stalls: int = 0
    converged: bool = False
    message: str = ""
    along: str = ""
    step: float = 0.0
    search: LineSearch | None = None
    numbers: dict[str, list[float]] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """Return the progress as values for JSON, which keep every bit."""
        return asdict(self)

    @classmethod
    def restored(cls, saved: Any) -> Self:
        """Return the progress that :meth:`saved` returned.

        Raises
        ------
        ValueError
            If ``saved`` is anything else.
        """
        made = cls(**_fields(cls, saved))
        if made.stage not in get_args(Stage):
            raise ValueError(f"stage is {made.stage!r:.80}")
        if made.search is not None:
            made.search = LineSearch.restored(_fields(LineSearch, made.search))
        if not all(isinstance(value, float) for values in made.numbers.values() for value in values):
            raise ValueError("numbers are not numbers")
        return made

    def end(self, message: str, *, converged: bool) -> None:
        """Want no further evaluation."""
        self.stage, self.message, self.converged = "done", message, converged


def is_progress(value: object) -> bool:
    """Tell whether a value is one that :meth:`MethodProgress.saved` may return."""
    try:
        MethodProgress.restored(value)
    except (TypeError, ValueError):
        return False
    return True


def _fields(kind: type, saved: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields, after checking their types: a file may hold any JSON."""
    expected = {f.name: getattr(kind(), f.name) for f in fields(kind)}
    if not isinstance(saved, Mapping) or saved.keys() != expected.keys():
        raise ValueError(f"{saved!r:.80} has not the entries {', '.join(expected)}")
    for name, value in saved.items():
        kinds = (type(expected[name]), list) if isinstance(expected[name], tuple) else type(expected[name])
        if expected[name] is not None and not isinstance(value, kinds):
            raise ValueError(f"{name} is {value!r:.80}")
    return dict(saved)


@dataclass(frozen=True, kw_only=True)
class VectorMethod(ABC):
    """Minimize a function of all parameters together; a step is one evaluation of the function and its gradient.

    Every step must be given the same samples, all of them. It ends with the parameters at which the next evaluation is
    wanted: those of a trial, until a trial is good enough to become the next iterate.

    Attributes
    ----------
    gtol : float
        The method has converged if no element of the gradient has a larger magnitude (of the projected gradient, if
        there are bounds).
    ftol : float
        It has also converged if an iteration lowers the loss by no more than this part of it (or of 1, if it is
        smaller). With 0 it has only if several iterations lower neither the loss nor the gradient.
    regularization : dict of str to callable, or None
        Terms that are added to the loss, by the names of parameters or patterns of names: :class:`Tikhonov`,
        :class:`TotalVariation`, or the user's own. ``term(values)`` is called on one rank with the whole parameter, and
        returns the value and the gradient, an array of its shape.

    Examples
    --------
    >>> import mpizero as mz
    >>> method = mz.LBFGS(gtol=1e-8, regularization={"velocity": mz.Tikhonov(0.1)})
    >>> isinstance(method, mz.optim.VectorMethod), method.gtol
    (True, 1e-08)
    >>> mz.NewtonCG(gtol=-1.0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: NewtonCG: gtol=-1.0: expected a finite number >= 0
    """

    gtol: float = 1e-5
    ftol: float = 0.0
    regularization: Any = None

    #: Part of the interface of optimizers: such a method updates no flat arrays by itself.
    needs_tensor_norms: ClassVar[bool] = False
    needs_whole_tensors: ClassVar[bool] = False
    elementwise_kernel: ClassVar[bool] = False
    needs_vectors: ClassVar[bool] = True

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of the parameters; None if there are none."""
        return None

    @property
    def preconditioner(self) -> Diagonal | None:
        """The factors of a diagonal preconditioner; None if there is none."""
        return None

    def check_names(self, names: Sequence[str]) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if bounds, say, are for parameters that a model lacks."""
        for given in (self.bounds, self.preconditioner, self.regularization):
            if given is not None:
                given.check_names(names, type(self).__name__)

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        owner = type(self).__name__
        require(f"{owner}: gtol", self.gtol, number())
        require(f"{owner}: ftol", self.ftol, number())
        object.__setattr__(self, "regularization", Regularization.parse(self.regularization, owner))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, which are as long as the parameters."""
        return (POINT, GRADIENT, DIRECTION, TRIAL)

    def group_of(self, spec: ParameterSpec) -> int:
        """Return 0, because all parameters are in the same group."""
        return 0

    def hyper(self, step: int, group: int, dtype: Dtype, lr: float | None = None) -> Array:
        """Return no scalars: the update needs those of :class:`MethodProgress`."""
        return np.zeros(0, dtype)

    # ------------------------------------------------------------------ one evaluation

    def advance(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Take the loss at the parameters, whose gradient is in ``TRIAL``; set the parameters to the next ones.

        Collective over the ranks of ``space``.
        """
        if progress.stage == "done":
            return
        progress.evaluations += 1
        if progress.stage != "first":
            self._take(space, progress, loss)
        elif not space.enter_bounds():
            self._arrive(space, progress, loss)
            progress.least_norm = progress.norm
            if not self._is_flat(progress):
                self._go_on(space, progress)

    def reject(self, space: VectorSpace, progress: MethodProgress) -> bool:
        """Take notice that loss or gradient are infinite or NaN; tell whether another trial can be made. Collective."""
        if progress.stage in ("first", "done"):
            return False
        progress.evaluations += 1
        self._take(space, progress, math.inf)
        return True

    def place(self, space: VectorSpace, progress: MethodProgress, *, iterate: bool) -> None:
        """Set the parameters to the last iterate, or to those of the next evaluation. Not collective."""
        if progress.along:
            space.move(POINT, 0.0 if iterate or progress.stage == "done" else progress.step, progress.along)

    @staticmethod
    def _want(space: VectorSpace, progress: MethodProgress, stage: Stage, step: float, along: str) -> None:
        """Set the parameters to ``POINT`` plus ``step`` times the vector ``along``, to be evaluated next."""
        progress.stage, progress.step, progress.along = stage, step, along
        space.move(POINT, step, along)

    def _accept(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Make the last trial the next iterate, and go on from there unless the method has converged. Collective."""
        before = progress.loss
        progress.iterations += 1
        self._arrive(space, progress, loss)
        progress.stalls = 0 if loss < before or progress.norm < progress.least_norm else progress.stalls + 1
        progress.least_norm = min(progress.least_norm, progress.norm)
        if self._is_flat(progress):
            return
        if self.ftol > 0.0 and before - loss <= self.ftol * max(abs(before), abs(loss), 1.0):
            progress.end(f"the loss has fallen by no more than ftol={self.ftol:g} of it", converged=True)
        elif progress.stalls >= _STALLS:
            progress.end("loss and gradient do not fall any more: they are as small as rounding allows", converged=True)
        else:
            self._go_on(space, progress)

    def _arrive(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        space.parameters(POINT)
        space.copy(TRIAL, GRADIENT)
        progress.loss, progress.norm = loss, space.largest_projected(GRADIENT)

    def _is_flat(self, progress: MethodProgress) -> bool:
        if progress.norm <= self.gtol:
            progress.end(f"the gradient's largest element is at most gtol={self.gtol:g}", converged=True)
        return progress.stage == "done"

    def _give_up(self, space: VectorSpace, progress: MethodProgress) -> None:
        """End at the last iterate, because nothing lowers the loss."""
        space.move(POINT, 0.0, DIRECTION)
        progress.end(
            "no step along the negative gradient lowers the loss: it is as small as rounding allows, or the gradient "
            "is wrong (mpizero.testing.check_model finds that)",
            converged=False,
        )

    # ------------------------------------------------------------------ what methods define

    @abstractmethod
    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Want an evaluation, at an iterate that has just been reached. Collective."""

    @abstractmethod
    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Take the evaluation that was wanted; the loss is infinite if there was none. Collective."""
