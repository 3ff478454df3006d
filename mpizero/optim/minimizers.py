"""Minimize a function of all parameters together: L-BFGS with bounds, conjugate gradients, and Newton's method.

A :class:`VectorMethod` looks at the whole vector of parameters, and keeps what it has reached in a
:class:`MethodProgress`; :class:`VectorSolver` runs it, one evaluation after the other. A :class:`SearchingMethod`
chooses a direction and searches along it (:class:`LineSearch`): :class:`LBFGS` and :class:`NonlinearCG` do.
:class:`NewtonCG` is Newton's method with conjugate gradients in a trust region.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np

from mpizero._util.checks import flag, number, positive, whole
from mpizero._util.settings import Settings, one_of, setting
from mpizero.errors import ConfigError
from mpizero.optim.regularization import TRIAL, Bounds, Diagonal, Regularization, VectorSpace
from mpizero.types import Array, Dtype, ParameterSpec

Stage = Literal["first", "search", "product", "done"]


#: State arrays of every method: the parameters of the last iterate, their gradient, and the direction of the search.
POINT, GRADIENT, DIRECTION = "point", "gradient", "direction"


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


#: So many iterations that lower neither the loss nor the gradient end a method.
_STALLS = 5


@dataclass(frozen=True, kw_only=True)
class VectorMethod(Settings, ABC):
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

    gtol: float = setting(1e-5, number(), resume="never")
    ftol: float = setting(0.0, number(), resume="never")
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
        for option in (self.bounds, self.preconditioner, self.regularization):
            if option is not None:
                option.check_names(names, type(self).__name__)

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        super().__post_init__()
        object.__setattr__(self, "regularization", Regularization.parse(self.regularization, type(self).__name__))

    def reject(self, name: str, message: str) -> ConfigError:
        """Return the error about the wrong setting ``name``; ``message`` says what is wrong, or what is allowed."""
        return ConfigError(f"{type(self).__name__}: {name}={getattr(self, name)!r}: {message}")

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
            self._set_iterate(space, progress, loss)
            progress.least_norm = progress.norm
            if not self._is_flat(progress):
                self._go_on(space, progress)

    def retry(self, space: VectorSpace, progress: MethodProgress) -> bool:
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
        self._set_iterate(space, progress, loss)
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

    def _set_iterate(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
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


class VectorSolver:
    """Run a method of whole vectors on the vectors of a space.

    Attributes
    ----------
    progress : MethodProgress
        What the method has reached.
    """

    def __init__(self, method: VectorMethod, space: VectorSpace) -> None:
        self._method, self._space, self.progress = method, space, MethodProgress()

    def advance(self, loss: float) -> None:
        """Take the loss at the parameters, and set them to the next ones. Collective over all ranks."""
        self._method.advance(self._space, self.progress, loss)

    def retry(self) -> bool:
        """Take notice that the loss or its gradient is infinite or NaN; tell whether the parameters were changed.

        Collective over all ranks.
        """
        return self._method.retry(self._space, self.progress)

    def place(self, *, iterate: bool) -> None:
        """Set the parameters to the last iterate, or to those that the method wants to be evaluated next.

        Not collective. Before the first evaluation both are the start values, which stay as they are.
        """
        self._method.place(self._space, self.progress, iterate=iterate)

    def restore(self, saved: Any) -> None:
        """Go on with the progress that ``progress.saved()`` has returned. Not collective."""
        self.progress = MethodProgress.restored(saved)


class Point(NamedTuple):
    """Hold a step, and the function's value and slope there."""

    step: float
    value: float
    slope: float

    def tilted(self, slope: float) -> Point:
        """Return the point of the function less a line of this slope through the origin."""
        return Point(self.step, self.value - self.step * slope, self.slope - slope)


#: An interval that has not shrunk to this part of its length in two evaluations is halved (section 4).
_SHRINK = 0.66
#: While there is no interval, the next step is so many times further from the best step, at least and at most.
_GROWTH = 1.1, 4.0
#: An interval below this part of its upper end cannot be made smaller.
_SMALLEST = 1e-8
#: A step at which the function is infinite or NaN is shortened to this part of its distance from the best one.
_CUT = 0.1

Outcome = Literal["searching", "found", "longest", "stuck"]


@dataclass
class LineSearch:
    """Search a step in (0, ``longest``] with enough decrease and a small slope, one evaluation at a time.

    The method is that of Moré & Thuente (1994), "Line search algorithms with guaranteed sufficient decrease". An
    interval that contains such steps is made smaller with every evaluation; the next step is the minimizer of a cubic
    or quadratic interpolant (section 4).

    These are the conditions ``value <= start.value + decrease * step * start.slope`` and ``abs(slope) <= curvature *
    abs(start.slope)``. A value that may differ from that of the start by rounding only says nothing; the one that
    follows from the slopes, ``start.value + step * (start.slope + slope) / 2``, takes its place. The first condition
    is then ``slope <= (2 * decrease - 1) * start.slope``, as in Hager & Zhang 2005, "A new conjugate gradient method
    with guaranteed descent and an efficient line search", section 4.

    Attributes
    ----------
    start : Point
        The function at step 0, where it falls.
    step : float
        The step to evaluate next.
    decrease, curvature : float
        The constants of the conditions, 0 < ``decrease`` < ``curvature`` < 1.
    longest : float
        The longest step.
    most : int
        The number of evaluations after which the search gives up.
    rounding : float
        Values that differ by no more than this may differ by rounding only.
    best : Point
        The end of the interval at which the function is smallest.
    other : Point
        The other end; the same point while there is no interval.
    """

    start: Point = Point(0.0, 0.0, 0.0)
    step: float = 1.0
    decrease: float = 1e-3
    curvature: float = 0.9
    longest: float = 1e10
    most: int = 20
    rounding: float = 0.0
    best: Point = Point(0.0, 0.0, 0.0)
    other: Point = Point(0.0, 0.0, 0.0)
    bracketed: bool = False
    tilts: bool = True
    ends: bool = False
    evaluations: int = 0
    length: float = 0.0
    length_before: float = 0.0

    def __post_init__(self) -> None:
        """Begin at the start, unless the search has begun before, and a checkpoint tells how far it is."""
        self.start, self.best, self.other = Point(*self.start), Point(*self.best), Point(*self.other)
        if not self.evaluations:
            self.best = self.other = self.start
            self.length, self.length_before = self.longest, 2.0 * self.longest

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Self:
        """Return the search whose fields are ``saved``; a point may be a list of three numbers.

        Raises
        ------
        ValueError
            If a point is anything else.
        """
        made = cls(**saved)
        for point in (made.start, made.best, made.other):
            if len(point) != 3 or not all(isinstance(value, float) for value in point):
                raise ValueError(f"{point!r:.80} is not a step, a value and a slope")
        return made

    def tell(self, value: float, slope: float) -> Outcome:
        """Take the function's value and slope at :attr:`step`, and set :attr:`step` to the next one if there is any.

        Returns
        -------
        str
            "found" if :attr:`step` satisfies the conditions, or no better one can be found; "longest" if it is the
            longest step and the function still falls there; "stuck" if the function has not fallen enough at any step;
            and "searching" if :attr:`step` is a new one.
        """
        self.evaluations += 1
        if self.ends:
            return "found"
        if not (math.isfinite(value) and math.isfinite(slope)):
            return self._shorten()
        if abs(value - self.start.value) <= self.rounding:  # so the interval shrinks to where the slope is small
            value = self.start.value + 0.5 * self.step * (self.start.slope + slope)
        point, line = Point(self.step, value, slope), self.decrease * self.start.slope
        enough = value <= self.start.value + self.step * line
        flat = abs(slope) <= self.curvature * abs(self.start.slope)
        if flat and enough:
            return "found"
        if enough and slope <= line and self.step >= self.longest:
            return "longest"
        self.tilts &= not (enough and slope >= 0.0)
        if self.tilts and value <= self.best.value and not enough:
            self._narrow(point, line)
        else:
            self._narrow(point, 0.0)
        return self._check()

    def _shorten(self) -> Outcome:
        """Take a shorter step than one at which the function has no value."""
        self.longest = self.step
        self.step = self.best.step + _CUT * (self.step - self.best.step)
        return "stuck" if self.evaluations >= self.most or self.step <= self.best.step else "searching"

    def _narrow(self, point: Point, line: float) -> None:
        """Replace an end of the interval by ``point``, and choose the next step (section 4).

        The comparisons are those of the function less a line of slope ``line``: until a step with enough decrease is
        found, its interval is the one that must contain such steps (section 2).
        """
        ends = (self.best.tilted(line), self.other.tilted(line), point.tilted(line))
        best, _, trial = ends
        turned = trial.slope * math.copysign(1.0, best.slope) < 0.0
        least, most = self._limits()
        step = _trial_step(*ends, bracketed=self.bracketed, least=least, most=most)
        self.bracketed |= turned or trial.value > best.value
        if trial.value > best.value:
            self.other = point
        else:
            self.other, self.best = (self.best if turned else self.other), point
        if self.bracketed:
            length = abs(self.other.step - self.best.step)
            if length >= _SHRINK * self.length_before:
                step = self.best.step + 0.5 * (self.other.step - self.best.step)
            self.length_before, self.length = self.length, length
        self.step = min(max(step, 0.0), self.longest)

    def _limits(self) -> tuple[float, float]:
        """Return the smallest and the largest step that may come next."""
        if self.bracketed:
            return min(self.best.step, self.other.step), max(self.best.step, self.other.step)
        beyond = self.step - self.best.step
        return self.step + _GROWTH[0] * beyond, min(self.step + _GROWTH[1] * beyond, self.longest)

    def _check(self) -> Outcome:
        """Tell whether the step that was chosen can be tried; otherwise choose the best one, if that is good enough."""
        least, most = self._limits()
        small = self.bracketed and (not least < self.step < most or most - least <= _SMALLEST * most)
        if not small and self.evaluations < self.most:
            return "searching"
        self.step, line = self.best.step, self.decrease * self.start.slope
        self.ends = self.best.value <= self.start.value + self.step * line and self.step > 0.0
        return "searching" if self.ends else "stuck"


def _trial_step(best: Point, other: Point, trial: Point, *, bracketed: bool, least: float, most: float) -> float:
    """Return the next step, from the ends of the interval and the last step (section 4, cases 1 to 4)."""
    cubic, fall = _cubic(best, trial), best.slope - trial.slope
    secant = trial.step + trial.slope / fall * (trial.step - best.step) if fall else math.inf
    if trial.value > best.value:
        length = trial.step - best.step
        quadratic = best.step + 0.5 * length * best.slope / (best.slope - (trial.value - best.value) / length)
        nearer = abs(cubic - best.step) < abs(quadratic - best.step)
        return cubic if nearer else cubic + 0.5 * (quadratic - cubic)
    if trial.slope * math.copysign(1.0, best.slope) < 0.0:
        return cubic if abs(cubic - trial.step) > abs(secant - trial.step) else secant
    forward = trial.step > best.step
    if abs(trial.slope) >= abs(best.slope):
        return _cubic(other, trial) if bracketed else (most if forward else least)
    if (cubic - trial.step) * (trial.step - best.step) <= 0.0:  # the cubic falls without end, or turns behind
        cubic = most if forward else least
    if not bracketed:
        return min(max(max(cubic, secant, key=lambda step: abs(step - trial.step)), least), most)
    step = min(cubic, secant, key=lambda step: abs(step - trial.step))
    limit = trial.step + _SHRINK * (other.step - trial.step)
    return min(step, limit) if forward else max(step, limit)


def _cubic(a: Point, b: Point) -> float:
    """Return the minimizer of the cubic with the values and slopes of two points; ``a.step`` if there is none."""
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope)) or 1.0
    root = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
    root = math.copysign(root, a.step - b.step)
    below = 2.0 * root - b.slope + a.slope
    return b.step + (root - b.slope + theta) / below * (a.step - b.step) if below else a.step


#: The longest step of a line search; the natural one is 1.
_LONGEST = 1e10


@dataclass(frozen=True, kw_only=True)
class SearchingMethod(VectorMethod):
    """Choose a direction, and search along it for a step that satisfies the strong Wolfe conditions.

    Attributes
    ----------
    most_trials : int
        The most evaluations of one line search.
    """

    most_trials: int = setting(20, whole(1), resume="never")

    #: Constants of the Wolfe conditions.
    decrease: ClassVar[float] = 1e-3
    curvature: ClassVar[float] = 0.9

    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        if progress.numbers:
            self._search_along(space, progress, self._choose(space, progress))
        else:
            self._descend(space, progress)

    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        search = progress.search
        assert search is not None
        outcome = search.tell(loss, space.dot(TRIAL, DIRECTION) if math.isfinite(loss) else math.inf)
        if outcome == "searching":
            self._want(space, progress, "search", search.step, DIRECTION)
        elif outcome == "stuck":
            self._restart(space, progress)
        else:
            self._learn(space, progress)
            self._accept(space, progress, loss)

    def _restart(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Go on along the negative gradient from the last iterate; end if that was the direction already."""
        if progress.numbers.get("steepest") == [1.0]:
            self._give_up(space, progress)
        else:
            self._descend(space, progress)

    def _descend(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin a search along the negative gradient, preconditioned if it can be, without what was learned."""
        progress.numbers = {"steepest": [1.0]}
        space.copy(GRADIENT, DIRECTION)
        space.scale(-1.0, DIRECTION)
        space.precondition(DIRECTION)
        self._search_along(space, progress, 1.0 / math.sqrt(space.dot(DIRECTION, DIRECTION)))

    def _search_along(self, space: VectorSpace, progress: MethodProgress, step: float) -> None:
        """Begin a search along ``DIRECTION`` with its first step; with bounds, of the way to where that step ends."""
        if space.bounded:
            space.clip(POINT, step, DIRECTION)
            step = 1.0
        slope = space.dot(GRADIENT, DIRECTION)
        if slope >= 0.0:
            self._restart(space, progress)
            return
        longest = min(_LONGEST, space.longest_step(POINT, DIRECTION))
        search = LineSearch(Point(0.0, progress.loss, slope), step, self.decrease, self.curvature, longest)
        search.most, search.rounding = self.most_trials, _rounding(space.precision) * abs(progress.loss)
        progress.search = search
        self._want(space, progress, "search", step, DIRECTION)

    # ------------------------------------------------------------------ what methods define

    @abstractmethod
    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Learn from the way from ``POINT`` to the parameters, and from ``GRADIENT`` to ``TRIAL``. Collective."""

    @abstractmethod
    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Set ``DIRECTION`` from ``GRADIENT``, and return the first step along it. Collective."""


#: Losses closer than so many units of rounding are taken as equal, because sums of many terms have errors of many
#: units; but not losses that differ by more than this part, and always those that differ by so few units.
_ROUNDING, _PART, _FEW = 1e4, 1e-6, 4.0


def _rounding(precision: float) -> float:
    """Return the part of a loss by which equal losses may differ in a type with this distance from 1 to the next."""
    return max(_FEW * precision, min(_ROUNDING * precision, _PART))


#: State array of the diagonal from which the approximation of the Hessian begins.
DIAGONAL = "diagonal"

#: A pair whose curvature is below this part of the largest that it could have is not used.
_LEAST_CURVATURE = 2.2e-16
INITIAL = ("scalar", "diagonal")


@dataclass(frozen=True, kw_only=True)
class LBFGS(SearchingMethod):
    """Implement L-BFGS (Liu & Nocedal 1989; Nocedal & Wright 2006, algorithm 7.5) with a strong Wolfe line search.

    Each step is one evaluation: give ``train`` all samples, the same ones in every step. The parameters after a step
    are those of the next trial; :func:`mpizero.minimize` makes steps until the method has converged, and leaves the
    model at the last iterate.

    With bounds, elements that a scaled gradient step takes to a bound go there, and are left out of the quasi-Newton
    step of the others (as in Bertsekas 1982, "Projected Newton methods for optimization problems with simple
    constraints"). Where the whole step leaves the bounds it is projected, and the line search runs on the way to its
    end, so every trial is within the bounds.

    Attributes
    ----------
    history : int
        Number of pairs of differences that are kept, each two vectors as long as the parameters.
    bounds : pair, dict of str to pair, or None
        Lower and upper bound of all parameters, or pairs by the names of parameters or patterns of names. A bound is a
        number, an array of the parameter's shape, or None. Start values beyond a bound are moved to it.
    preconditioner : dict of str to float or Array, or None
        Positive factors by the names of parameters or patterns of names, each a number or an array of the parameter's
        shape; 1 for other parameters. They are the diagonal of the inverse Hessian, up to one factor, from which the
        approximation begins in every iteration: large where the loss depends little on an element.
    initial : {"scalar", "diagonal"}
        From which matrix the approximation begins in every iteration: a number times the preconditioner, or a diagonal
        that is learned, the diagonal of the BFGS update of itself, scaled by the newest pair (Gilbert & Lemaréchal
        1989, "Some numerical experiments with variable-storage quasi-Newton algorithms"). That takes one vector more,
        and often fewer evaluations where unknowns have different scales.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.distribute(mz.FunctionModel({"x": np.zeros(2)}, bowl), None, "ddp") as model:
    ...     result = mz.minimize(model, method=mz.LBFGS(history=5, bounds=(None, 1.5)))
    ...     print(result.x.round(6), result.success)
    [1.  1.5] True
    """

    history: int = setting(10, whole(1), resume="never")
    bounds: Any = None
    preconditioner: Any = None
    initial: str = setting("scalar", one_of(*INITIAL), resume="never")

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        super().__post_init__()
        owner = type(self).__name__
        object.__setattr__(self, "bounds", Bounds.parse(self.bounds, owner))
        object.__setattr__(self, "preconditioner", Diagonal.parse(self.preconditioner, owner))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: those of every method, and the differences of parameters and of gradients."""
        pairs = (f"{kind}_difference_{i}" for i in range(self.history) for kind in ("parameter", "gradient"))
        return (*super().slots, *pairs, *[DIAGONAL] * (self.initial == "diagonal"))

    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        numbers = progress.numbers
        made = int(numbers.get("made", [0.0])[0])
        s, y = _pair(made % self.history)
        space.parameters(s)
        space.add(-1.0, POINT, s)
        space.copy(TRIAL, y)
        space.add(-1.0, GRADIENT, y)
        space.copy(y, DIRECTION)  # which the search has ended
        space.precondition(DIRECTION)
        curvature, square = space.dot(s, y), space.dot(y, DIRECTION)
        steepness = -space.dot(GRADIENT, s)
        if curvature <= _LEAST_CURVATURE * steepness or square == 0.0:
            return
        rho = numbers.setdefault("rho", [0.0] * self.history)
        rho[made % self.history] = 1.0 / curvature
        if self.initial == "diagonal":
            self._learn_diagonal(space, s, y, curvature, first=made == 0)
        numbers["made"], numbers["gamma"] = [made + 1.0], [curvature / square]

    @staticmethod
    def _learn_diagonal(space: VectorSpace, s: str, y: str, curvature: float, *, first: bool) -> None:
        """Update ``DIAGONAL`` by the newest pair, so that the pair's curvature is right along ``y``; uses DIRECTION."""
        if first:  # the inverse of the preconditioner
            space.fill(1.0, DIRECTION)
            space.precondition(DIRECTION)
            space.fill(1.0, DIAGONAL)
            space.divide(DIRECTION, DIAGONAL)
        else:
            space.copy(s, DIRECTION)
            space.multiply(DIAGONAL, DIRECTION)
            space.update_diagonal(DIAGONAL, y, curvature, DIRECTION, space.dot(s, DIRECTION))
        space.copy(y, DIRECTION)
        space.divide(DIAGONAL, DIRECTION)
        space.scale(space.dot(y, DIRECTION) / curvature, DIAGONAL)

    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Set ``DIRECTION`` to minus the inverse Hessian's approximation times the gradient, by the two loops."""
        numbers = progress.numbers
        numbers.pop("steepest", None)
        gamma = numbers.get("gamma", [1.0])[0]
        made = int(numbers.get("made", [0.0])[0])
        latest_first = [index % self.history for index in range(made - 1, max(-1, made - 1 - self.history), -1)]
        space.copy(GRADIENT, DIRECTION)
        space.drop_fixed(GRADIENT, gamma, DIRECTION)
        rho, alphas = numbers.get("rho", []), {}
        for index in latest_first:
            s, y = _pair(index)
            alphas[index] = rho[index] * space.dot(s, DIRECTION)
            space.add(-alphas[index], y, DIRECTION)
            space.drop_fixed(GRADIENT, gamma, DIRECTION)
        if self.initial == "diagonal":
            space.scale(-1.0, DIRECTION)
            space.divide(DIAGONAL, DIRECTION)
        else:
            space.scale(-gamma, DIRECTION)
            space.precondition(DIRECTION)
        for index in reversed(latest_first):
            s, y = _pair(index)
            space.add(-alphas[index] - rho[index] * space.dot(y, DIRECTION), s, DIRECTION)
            space.drop_fixed(GRADIENT, gamma, DIRECTION)
        space.go_to_bounds(GRADIENT, gamma, DIRECTION)
        return 1.0


def _pair(index: int) -> tuple[str, str]:
    return f"parameter_difference_{index}", f"gradient_difference_{index}"


#: A direction descends if its slope is below minus this part of the gradient's square.
_DESCENT = 0.01


@dataclass(frozen=True, kw_only=True)
class NonlinearCG(SearchingMethod):
    """Implement conjugate gradients of Polak and Ribière with nonnegative factors (Nocedal & Wright 2006, section 5.2).

    Each step is one evaluation, as with :class:`LBFGS`, and needs all samples; it keeps four vectors, whatever the
    number of iterations. There are no bounds.

    Attributes
    ----------
    gtol, ftol, regularization
        As in :class:`VectorMethod`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.distribute(mz.FunctionModel({"x": np.zeros(2)}, bowl), None, "ddp") as model:
    ...     result = mz.minimize(model, method=mz.NonlinearCG(gtol=1e-8))
    ...     print(result.x.round(6), result.success)
    [1. 2.] True
    """

    decrease: ClassVar[float] = 1e-4
    curvature: ClassVar[float] = 0.4

    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        old, new, mixed = (space.dot(a, b) for a, b in ((GRADIENT, GRADIENT), (TRIAL, TRIAL), (TRIAL, GRADIENT)))
        search = progress.search
        assert search is not None
        progress.numbers = {
            "factor": [max(0.0, (new - mixed) / old)],
            "square": [new],
            "fallen": [search.step * search.start.slope],
        }

    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        numbers = progress.numbers
        (factor,), (square,), (fallen,) = (numbers[name] for name in ("factor", "square", "fallen"))
        space.scale(factor, DIRECTION)
        space.add(-1.0, GRADIENT, DIRECTION)
        slope = space.dot(GRADIENT, DIRECTION)
        if slope > -_DESCENT * square:
            space.copy(GRADIENT, DIRECTION)
            space.scale(-1.0, DIRECTION)
            slope = -square
        # The loss is taken to change as much, to first order, as in the iteration before (section 3.5).
        return fallen / slope


#: The state arrays of the inner conjugate gradients: the model's gradient at ``DIRECTION``, and their own direction.
RESIDUAL, CONJUGATE = "residual", "conjugate"
#: A step is accepted if the loss falls by more than this part of what the model predicts. If it falls by less than the
#: second part, the region shrinks to the third part of the step; above the fourth it doubles, up to the last (Nocedal &
#: Wright 2006, algorithm 4.1).
_ACCEPT, _POOR, _SHRINK_REGION, _GOOD, _WIDEST = 1e-4, 0.25, 0.25, 0.75, 1e10
#: A region smaller than this part of the point's length ends the method.
_SMALLEST_REGION = 1e-14


@dataclass(frozen=True, kw_only=True)
class NewtonCG(VectorMethod):
    """Implement Newton's method with conjugate gradients in a trust region (Steihaug 1983).

    Each step is one evaluation of loss and gradient, as with :class:`LBFGS`, and needs all samples. A product with the
    Hessian is the difference of two gradients, so it costs an evaluation, too; :func:`mpizero.minimize` takes the
    model's own products where it has some, Gauss and Newton's for example. Directions of negative curvature are
    followed to the edge of the region. There are no bounds.

    Attributes
    ----------
    radius : float
        The first radius of the trust region, > 0.
    exact : bool
        Whether evaluations for products are the model's own ones; only for :func:`mpizero.minimize`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.distribute(mz.FunctionModel({"x": np.zeros(2)}, bowl), None, "ddp") as model:
    ...     result = mz.minimize(model, method=mz.NewtonCG(radius=10.0))
    ...     print(result.x.round(6), result.success)
    [1. 2.] True
    """

    radius: float = setting(1.0, positive, resume="never")
    exact: bool = setting(False, flag)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: those of every method, and two of the conjugate gradients."""
        return (*super().slots, RESIDUAL, CONJUGATE)

    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin the conjugate gradients at the middle of the region, and want their first product."""
        square = space.dot(GRADIENT, GRADIENT)
        norm = math.sqrt(square)
        radius = progress.numbers.get("radius", [self.radius])[0]
        length = math.sqrt(space.dot(POINT, POINT))
        if radius <= _SMALLEST_REGION * max(length, _SMALLEST_REGION):
            self._give_up(space, progress)
            return
        space.copy(GRADIENT, RESIDUAL)
        space.copy(GRADIENT, CONJUGATE)
        space.scale(-1.0, CONJUGATE)
        space.scale(0.0, DIRECTION)
        progress.numbers = {
            "radius": [radius],
            "square": [square],
            "enough": [min(0.5, math.sqrt(norm)) * norm],
            "scale": [math.sqrt(space.precision) * (1.0 + length)],
        }
        self._want_product(space, progress)

    def _want_product(self, space: VectorSpace, progress: MethodProgress) -> None:
        if self.exact:
            self._want(space, progress, "product", 0.0, CONJUGATE)
            return
        length = math.sqrt(space.dot(CONJUGATE, CONJUGATE))
        self._want(space, progress, "product", progress.numbers["scale"][0] / length, CONJUGATE)

    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        if progress.stage == "product":
            self._take_product(space, progress, loss)
        else:
            self._take_trial(space, progress, loss)

    # ------------------------------------------------------------------ the model inside the region

    def _take_product(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Take a product with the Hessian; then want another one, or a trial of the model's minimizer.

        Without a product (the loss is not finite there) the step ends where it is; the first one goes to the edge.
        """
        numbers = progress.numbers
        if not math.isfinite(loss):
            if not numbers.get("inside"):
                space.add(self._edge(space, progress), CONJUGATE, DIRECTION)
            self._want(space, progress, "search", 1.0, DIRECTION)
            return
        if not self.exact:
            space.add(-1.0, GRADIENT, TRIAL)
            space.scale(1.0 / progress.step, TRIAL)
        curvature, (square,) = space.dot(CONJUGATE, TRIAL), numbers["square"]
        edge = self._edge(space, progress)
        inside = curvature > 0.0 and square / curvature < edge
        step = square / curvature if inside else edge
        space.add(step, CONJUGATE, DIRECTION)
        space.add(step, TRIAL, RESIDUAL)
        left = space.dot(RESIDUAL, RESIDUAL)
        if not inside or math.sqrt(left) <= numbers["enough"][0]:
            self._want(space, progress, "search", 1.0, DIRECTION)
            return
        numbers["square"], numbers["inside"] = [left], [1.0]
        space.scale(left / square, CONJUGATE)
        space.add(-1.0, RESIDUAL, CONJUGATE)
        self._want_product(space, progress)

    def _edge(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Return the step along ``CONJUGATE`` from ``DIRECTION`` to the edge of the region."""
        a, b = space.dot(CONJUGATE, CONJUGATE), space.dot(DIRECTION, CONJUGATE)
        c = space.dot(DIRECTION, DIRECTION) - progress.numbers["radius"][0] ** 2
        root = math.sqrt(max(0.0, b * b - a * c))
        return (root - b) / a if b <= 0.0 else -c / (b + root)

    # ------------------------------------------------------------------ a trial of the step

    def _take_trial(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Accept the step or stay, and choose the next radius."""
        numbers = progress.numbers
        length = math.sqrt(space.dot(DIRECTION, DIRECTION))
        # The model's gradient at the step is RESIDUAL, at its start GRADIENT: the model falls by the mean slope.
        predicted = -0.5 * (space.dot(DIRECTION, RESIDUAL) + space.dot(DIRECTION, GRADIENT))
        rounding = 10.0 * space.precision * max(1.0, abs(progress.loss))
        ratio = -math.inf
        if math.isfinite(loss):
            fallen = progress.loss - loss
            small = max(abs(fallen), abs(predicted)) <= rounding
            ratio = 1.0 if small else fallen / predicted if predicted > 0.0 else -math.inf
        (radius,) = numbers["radius"]
        if ratio < _POOR:
            radius = _SHRINK_REGION * length
        elif ratio > _GOOD and length >= 0.99 * radius:
            radius = min(2.0 * radius, _WIDEST)
        progress.numbers = {"radius": [radius]}
        if ratio > _ACCEPT:
            self._accept(space, progress, loss)
        else:
            self._go_on(space, progress)
