"""Minimize a function of all parameters together: L-BFGS with bounds, conjugate gradients, and Newton's method.

A :class:`VectorMethod` updates the vector of all parameters, and keeps its scalar state in a :class:`MethodProgress`;
:class:`VectorSolver` runs the method, one evaluation after the other. A :class:`SearchingMethod` chooses a direction
and searches along it (:class:`LineSearch`): :class:`LBFGS` and :class:`NonlinearCG` are such methods. :class:`NewtonCG`
is Newton's method with conjugate gradients in a trust region.
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
    """Hold the scalar state of a :class:`VectorMethod`, which is the same on all ranks.

    Attributes
    ----------
    stage : str
        Purpose of the next evaluation: "first" evaluates the start values, "search" a trial point, and "product" a
        point for a product with the Hessian. "done" means that the method has ended.
    iterations, evaluations : int
        Numbers of iterations and of evaluations so far.
    loss, norm : float
        Loss and largest magnitude of the gradient (with bounds, of the projected gradient) at the last iterate.
    least_norm, stalls : float and int
        The smallest ``norm`` so far, and the number of iterates in a row, up to the last one, at which neither
        ``least_norm`` nor the loss became smaller.
    converged : bool
        Whether the method has ended because it has converged.
    message : str
        Why the method has ended.
    along, step : str and float
        The next evaluation is at the last iterate plus ``step`` times the vector named ``along`` ("" for the first
        evaluation).
    search : LineSearch or None
        The state of the line search; None for methods without a line search.
    numbers : dict of str to list of float
        Other scalars of a method, by name.
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
        """Return the progress as a dictionary for JSON, without loss of bits."""
        return asdict(self)

    @classmethod
    def restored(cls, saved: Any) -> Self:
        """Make a progress from the dictionary that :meth:`saved` returned.

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
        """End the method; ``message`` says why."""
        self.stage, self.message, self.converged = "done", message, converged


def is_progress(value: object) -> bool:
    """Tell whether a value is one that :meth:`MethodProgress.saved` may return."""
    try:
        MethodProgress.restored(value)
    except (TypeError, ValueError):
        return False
    return True


def _fields(kind: type, saved: Any) -> dict[str, Any]:
    """Check the types of a dataclass's fields read from a file, which may hold any JSON; return the fields."""
    expected = {f.name: getattr(kind(), f.name) for f in fields(kind)}
    if not isinstance(saved, Mapping) or saved.keys() != expected.keys():
        raise ValueError(f"{saved!r:.80} has not the entries {', '.join(expected)}")
    for name, value in saved.items():
        kinds = (type(expected[name]), list) if isinstance(expected[name], tuple) else type(expected[name])
        if expected[name] is not None and not isinstance(value, kinds):
            raise ValueError(f"{name} is {value!r:.80}")
    return dict(saved)


#: Number of iterations in a row that lower neither the loss nor the gradient, after which a method ends.
_STALLS = 5


@dataclass(frozen=True, kw_only=True)
class VectorMethod(Settings, ABC):
    """Minimize a function of all parameters together; a step is one evaluation of the function and its gradient.

    Every step must be given all samples, the same ones each time. A step sets the parameters to the point of the next
    evaluation: a trial point, until one is good enough to become the next iterate.

    Attributes
    ----------
    gtol : float
        The method has converged if no element of the gradient (with bounds, of the projected gradient) has a larger
        magnitude.
    ftol : float
        The method has also converged if an iteration lowers the loss by at most ``ftol`` times the larger of 1 and the
        loss's magnitude, before or after the iteration; not tested if ``ftol`` is 0. With any ``ftol`` the method ends
        after five iterations in a row in which the loss did not fall, and the gradient's largest magnitude reached no
        new minimum.
    regularization : dict of str to callable, or None
        Terms that are added to the loss, by the names of parameters or patterns of names: :class:`Tikhonov`,
        :class:`TotalVariation`, or the user's own. ``term(values)`` is called on one rank with the whole parameter, and
        returns the value and the gradient, an array of the parameter's shape.

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

    #: Part of the interface of optimizers: a method does not update flat arrays element by element.
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
        """Raise :class:`~mpizero.errors.ConfigError` if bounds, factors or terms are for unknown parameters."""
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
        """Return an empty array, because the scalars of a method are in :class:`MethodProgress`."""
        return np.zeros(0, dtype)

    # ------------------------------------------------------------------ one evaluation

    def advance(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Process the loss and gradient at the parameters; set the parameters to the next point to evaluate.

        The gradient is the vector ``TRIAL`` of ``space``. Collective over the ranks of ``space``.
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
        """Process an infinite or NaN loss or gradient; tell whether the parameters were changed. Collective."""
        if progress.stage in ("first", "done"):
            return False
        progress.evaluations += 1
        self._take(space, progress, math.inf)
        return True

    def place(self, space: VectorSpace, progress: MethodProgress, *, iterate: bool) -> None:
        """Set the parameters to the last iterate if ``iterate``, else to the next point to evaluate. Not collective."""
        if progress.along:
            space.move(POINT, 0.0 if iterate or progress.stage == "done" else progress.step, progress.along)

    @staticmethod
    def _want(space: VectorSpace, progress: MethodProgress, stage: Stage, step: float, along: str) -> None:
        """Request an evaluation at the last iterate plus ``step`` times the vector ``along``; set the parameters to it.

        ``stage`` is the purpose of the evaluation, as in :attr:`MethodProgress.stage`.
        """
        progress.stage, progress.step, progress.along = stage, step, along
        space.move(POINT, step, along)

    def _accept(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Make the last trial the next iterate; begin an iteration unless the method has converged. Collective."""
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
        """End at the last iterate, because no step lowers the loss."""
        space.move(POINT, 0.0, DIRECTION)
        progress.end(
            "no step along the negative gradient lowers the loss: it is as small as rounding allows, or the gradient "
            "is wrong (mpizero.testing.check_model finds that)",
            converged=False,
        )

    # ------------------------------------------------------------------ what methods define

    @abstractmethod
    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin an iteration at a new iterate: request its first evaluation. Collective."""

    @abstractmethod
    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Process the requested evaluation; ``loss`` is infinite if the function was infinite or NaN. Collective."""


class VectorSolver:
    """Run a :class:`VectorMethod` on the vectors of a :class:`VectorSpace`.

    Attributes
    ----------
    progress : MethodProgress
        The scalar state of the method.
    """

    def __init__(self, method: VectorMethod, space: VectorSpace) -> None:
        self._method, self._space, self.progress = method, space, MethodProgress()

    def advance(self, loss: float) -> None:
        """Process the loss at the parameters; set them to the next point to evaluate. Collective over all ranks."""
        self._method.advance(self._space, self.progress, loss)

    def retry(self) -> bool:
        """Process an infinite or NaN loss or gradient; tell whether the parameters were changed.

        Collective over all ranks.
        """
        return self._method.retry(self._space, self.progress)

    def place(self, *, iterate: bool) -> None:
        """Set the parameters to the last iterate if ``iterate``, else to the next point to evaluate.

        Not collective. Before the first evaluation both are the start values, and nothing is changed.
        """
        self._method.place(self._space, self.progress, iterate=iterate)

    def restore(self, saved: Any) -> None:
        """Continue from a progress that ``progress.saved()`` has returned. Not collective."""
        self.progress = MethodProgress.restored(saved)


class Point(NamedTuple):
    """Hold a step of a line search, and the function's value and slope at this step."""

    step: float
    value: float
    slope: float

    def tilted(self, slope: float) -> Point:
        """Return this point of the function minus ``slope * step``: value and derivative change, the step does not."""
        return Point(self.step, self.value - self.step * slope, self.slope - slope)


#: An interval that has not shrunk to this fraction of its length in two evaluations is halved (section 4).
_SHRINK = 0.66
#: Least and greatest factor by which the distance from the best step grows while there is no interval.
_GROWTH = 1.1, 4.0
#: An interval whose length is below this fraction of its upper end is not made smaller.
_SMALLEST = 1e-8
#: A step at which the function is infinite or NaN is shortened to this fraction of its distance from the best step.
_CUT = 0.1

Outcome = Literal["searching", "found", "longest", "stuck"]


@dataclass
class LineSearch:
    """Search for a step in (0, ``longest``] with enough decrease and a small slope, one evaluation at a time.

    The method is that of Moré & Thuente (1994), "Line search algorithms with guaranteed sufficient decrease". Every
    evaluation shrinks an interval that contains such steps; the next step is the minimizer of a cubic or quadratic
    interpolant (section 4).

    The conditions are ``value <= start.value + decrease * step * start.slope`` and ``abs(slope) <= curvature *
    abs(start.slope)``. A value that differs from ``start.value`` by no more than ``rounding`` is replaced by
    ``start.value + step * (start.slope + slope) / 2``, which follows from the slopes. The first condition is then
    ``slope <= (2 * decrease - 1) * start.slope``, as in Hager & Zhang 2005, "A new conjugate gradient method with
    guaranteed descent and an efficient line search", section 4.

    Attributes
    ----------
    start : Point
        The function at step 0, where its slope is negative.
    step : float
        The step to evaluate next.
    decrease, curvature : float
        The constants of the conditions, 0 < ``decrease`` < ``curvature`` < 1.
    longest : float
        The longest step allowed.
    most : int
        The number of evaluations after which the search gives up.
    rounding : float
        Values that differ by no more than this number may differ because of rounding only.
    best : Point
        The end of the interval at which the function has the smallest value so far.
    other : Point
        The other end of the interval; ``start`` while there is no interval.
    bracketed : bool
        Whether an interval has been found.
    tilts : bool
        Whether no step so far had enough decrease and a slope >= 0 (stage 1 of the paper, section 2).
    ends : bool
        Whether ``step`` is the best step again, whose evaluation ends the search.
    evaluations : int
        Number of evaluations so far.
    length, length_before : float
        Length of the interval, and its length one evaluation before.
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
        """Begin at ``start``, unless the fields are those of a search that has already made evaluations."""
        self.start, self.best, self.other = Point(*self.start), Point(*self.best), Point(*self.other)
        if not self.evaluations:
            self.best = self.other = self.start
            self.length, self.length_before = self.longest, 2.0 * self.longest

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Self:
        """Make a search from the fields ``saved``; a point may be a list of three numbers.

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
        """Process the function's value and slope at :attr:`step`, and set :attr:`step` to the next one if there is any.

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
        """Choose a shorter step, because the function is infinite or NaN at the last step."""
        self.longest = self.step
        self.step = self.best.step + _CUT * (self.step - self.best.step)
        return "stuck" if self.evaluations >= self.most or self.step <= self.best.step else "searching"

    def _narrow(self, point: Point, line: float) -> None:
        """Replace an end of the interval by ``point``, and choose the next step (Moré & Thuente 1994, section 4).

        Points are compared after a line of slope ``line`` is subtracted from the function: until a step with enough
        decrease is found, the interval for this difference contains such steps (section 2 of the paper).
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
        """Return the smallest and the largest value that the next step may have."""
        if self.bracketed:
            return min(self.best.step, self.other.step), max(self.best.step, self.other.step)
        beyond = self.step - self.best.step
        return self.step + _GROWTH[0] * beyond, min(self.step + _GROWTH[1] * beyond, self.longest)

    def _check(self) -> Outcome:
        """Return "searching" if the chosen step can be evaluated; otherwise choose the best step so far.

        If the function has fallen enough at the best step, return "searching", too: evaluating that step again ends the
        search. Else return "stuck".
        """
        least, most = self._limits()
        small = self.bracketed and (not least < self.step < most or most - least <= _SMALLEST * most)
        if not small and self.evaluations < self.most:
            return "searching"
        self.step, line = self.best.step, self.decrease * self.start.slope
        self.ends = self.best.value <= self.start.value + self.step * line and self.step > 0.0
        return "searching" if self.ends else "stuck"


def _trial_step(best: Point, other: Point, trial: Point, *, bracketed: bool, least: float, most: float) -> float:
    """Return the next step, from the ends ``best`` and ``other`` of the interval and the last step, ``trial``.

    The rules are cases 1 to 4 of Moré & Thuente 1994, section 4. ``bracketed`` tells whether there is an interval
    already; ``least`` and ``most`` are what :meth:`LineSearch._limits` returned.
    """
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
    if (cubic - trial.step) * (trial.step - best.step) <= 0.0:  # no minimum in this direction
        cubic = most if forward else least
    if not bracketed:
        return min(max(max(cubic, secant, key=lambda step: abs(step - trial.step)), least), most)
    step = min(cubic, secant, key=lambda step: abs(step - trial.step))
    limit = trial.step + _SHRINK * (other.step - trial.step)
    return min(step, limit) if forward else max(step, limit)


def _cubic(a: Point, b: Point) -> float:
    """Return the minimizer of the cubic through two points with their slopes; ``a.step`` if there is no minimizer."""
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope)) or 1.0
    middle = theta / scale
    root = scale * math.sqrt(max(0.0, middle * middle - (a.slope / scale) * (b.slope / scale)))
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
        The greatest number of evaluations of one line search.
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
        """Search along the negative gradient from the last iterate; give up if the last search was along it, too."""
        if progress.numbers.get("steepest") == [1.0]:
            self._give_up(space, progress)
        else:
            self._descend(space, progress)

    def _descend(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin a search along the (preconditioned) negative gradient; forget earlier iterations."""
        progress.numbers = {"steepest": [1.0]}
        space.copy(GRADIENT, DIRECTION)
        space.scale(-1.0, DIRECTION)
        space.precondition(DIRECTION)
        self._search_along(space, progress, 1.0 / math.sqrt(space.dot(DIRECTION, DIRECTION)))

    def _search_along(self, space: VectorSpace, progress: MethodProgress, step: float) -> None:
        """Begin a line search along the vector ``DIRECTION`` from the last iterate; ``step`` is the first step.

        With bounds the search is along the projection of that step.
        """
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
        """Update the method's own quantities after an iteration. Collective.

        The vectors ``POINT`` and ``GRADIENT`` are still the iterate before this iteration, and its gradient.
        """

    @abstractmethod
    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Set the vector ``DIRECTION`` from ``GRADIENT``, that of the last iterate; return the first step along it.

        Collective.
        """


#: Losses count as equal if their relative difference is at most ``_ROUNDING`` machine epsilons, because sums of many
#: terms have errors of many epsilons. The limit is at most ``_PART``, and at least ``_FEW`` epsilons.
_ROUNDING, _PART, _FEW = 1e4, 1e-6, 4.0


def _rounding(precision: float) -> float:
    """Return the relative difference up to which losses count as equal; ``precision`` is the machine epsilon."""
    return max(_FEW * precision, min(_ROUNDING * precision, _PART))


#: State array of the diagonal from which the approximation of the Hessian begins.
DIAGONAL = "diagonal"

#: A pair is not used if its curvature s^T y is below this fraction of the slope -g^T s.
_LEAST_CURVATURE = 2.2e-16
INITIAL = ("scalar", "diagonal")


@dataclass(frozen=True, kw_only=True)
class LBFGS(SearchingMethod):
    """Implement L-BFGS (Liu & Nocedal 1989; Nocedal & Wright 2006, algorithm 7.5) with a strong Wolfe line search.

    Each step is one evaluation: give ``train`` all samples, the same ones in every step. The parameters after a step
    are the next trial point; :func:`mpizero.minimize` makes steps until the method has converged, and leaves the model
    at the last iterate.

    With bounds, elements that a scaled gradient step moves to or beyond a bound are set to the bound, and the
    quasi-Newton step is that of the other elements (as in Bertsekas 1982, "Projected Newton methods for optimization
    problems with simple constraints"). A step that leaves the bounds is projected onto them, and the line search runs
    along the projected step, so every trial point is within the bounds.

    Attributes
    ----------
    history : int
        Number of pairs of differences that are kept, each two vectors as long as the parameters.
    bounds : pair, dict of str to pair, or None
        Lower and upper bound of all parameters, or pairs by the names of parameters or patterns of names. A bound is a
        number, an array of the parameter's shape, or None. Start values beyond a bound are moved to it.
    preconditioner : dict of str to float or Array, or None
        Positive factors by the names of parameters or patterns of names, each a number or an array of the parameter's
        shape; 1 for other parameters. Up to a common factor, the factors are the diagonal matrix from which the
        approximation of the inverse Hessian begins in every iteration: large for elements on which the loss depends
        little.
    initial : {"scalar", "diagonal"}
        The matrix from which the approximation of the inverse Hessian begins in every iteration: a number times the
        preconditioner, or the inverse of a diagonal matrix that is updated by the diagonal of the BFGS formula and
        scaled by the newest pair (Gilbert & Lemaréchal 1989, "Some numerical experiments with variable-storage
        quasi-Newton algorithms"). The diagonal matrix takes one vector more, and often fewer evaluations if parameters
        have different scales.

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
        """Names of the state arrays: those of every method, the pairs of differences, and the diagonal if used."""
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
        space.copy(y, DIRECTION)  # no longer needed after the search
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
        """Update ``DIAGONAL`` (the matrix D) by the newest pair, scaled so that y^T D^-1 y is s^T y.

        ``curvature`` is s^T y. With ``first``, D becomes the inverse of the preconditioner, scaled in the same way.
        ``DIRECTION`` is overwritten.
        """
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
        """Set ``DIRECTION`` to minus the approximate inverse Hessian times the gradient, by the two-loop recursion."""
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


#: A direction is used if its slope is below minus this fraction of the gradient's squared norm.
_DESCENT = 0.01


@dataclass(frozen=True, kw_only=True)
class NonlinearCG(SearchingMethod):
    """Implement conjugate gradients of Polak and Ribière with nonnegative factors (Nocedal & Wright 2006, section 5.2).

    Each step is one evaluation, as with :class:`LBFGS`, and needs all samples. The method keeps four vectors, whatever
    the number of iterations, and has no bounds.

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
        # The first step is the one by which the loss changes as much, to first order, as in the last iteration (3.5).
        return fallen / slope


#: The state arrays of the inner conjugate gradients: the model's gradient at ``DIRECTION``, and their own direction.
RESIDUAL, CONJUGATE = "residual", "conjugate"
#: A step is accepted if the loss falls by more than ``_ACCEPT`` times what the quadratic model predicts. If it falls by
#: less than ``_POOR`` times, the radius becomes ``_SHRINK_REGION`` times the length of the step; above ``_GOOD`` times
#: it doubles, up to ``_WIDEST`` (Nocedal & Wright 2006, algorithm 4.1).
_ACCEPT, _POOR, _SHRINK_REGION, _GOOD, _WIDEST = 1e-4, 0.25, 0.25, 0.75, 1e10
#: The method ends if the radius is below this fraction of the norm of the parameters.
_SMALLEST_REGION = 1e-14


@dataclass(frozen=True, kw_only=True)
class NewtonCG(VectorMethod):
    """Implement Newton's method with conjugate gradients in a trust region (Steihaug 1983).

    Each step is one evaluation of loss and gradient, as with :class:`LBFGS`, and needs all samples. A product with the
    Hessian is the difference of two gradients, so it costs an evaluation, too; :func:`mpizero.minimize` uses the
    model's own products if it has them, Gauss-Newton products for example. Directions of negative curvature are
    followed to the edge of the trust region. The method has no bounds.

    Attributes
    ----------
    radius : float
        The first radius of the trust region, > 0.
    exact : bool
        Whether products with the Hessian are the model's own, not differences of gradients; only for
        :func:`mpizero.minimize`.

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
        """Begin the conjugate gradients at the centre of the trust region, and request their first product."""
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
        """Process a product with the Hessian; then request another product, or a trial of the step found.

        If there is no product because the loss was not finite, the step found so far is tried; if it is still 0, a step
        to the edge of the trust region.
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
        """Return the factor t with which ``DIRECTION + t * CONJUGATE`` is at the edge of the trust region.

        The vector ``DIRECTION`` is the step found so far, from the centre of the region, and ``CONJUGATE`` is the
        direction along which the conjugate gradients go on.
        """
        a, b = space.dot(CONJUGATE, CONJUGATE), space.dot(DIRECTION, CONJUGATE)
        (radius,) = progress.numbers["radius"]
        c = space.dot(DIRECTION, DIRECTION) - radius * radius
        root = math.sqrt(max(0.0, b * b - a * c))
        return (root - b) / a if b <= 0.0 else -c / (b + root)

    # ------------------------------------------------------------------ a trial of the step

    def _take_trial(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Accept or reject the step (the vector ``DIRECTION``); choose the next radius of the trust region.

        ``loss`` is that after the step; infinite if the function was infinite or NaN.
        """
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
