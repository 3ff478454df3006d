"""Minimize the mean loss over all samples by a full-batch method, such as L-BFGS: the function ``mpizero.minimize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import optim
from mpizero._util.checks import require, whole
from mpizero._util.names import explains, nearest
from mpizero.comm.agreement import agree_arrays, agree_equal, agree_on_call, all_ranks
from mpizero.data import ArraySource
from mpizero.data.batches import full_batch
from mpizero.errors import ArgumentError, ConfigError
from mpizero.optim.minimizers import MethodProgress
from mpizero.sharding.fit import compared_samples
from mpizero.sharding.forward_backward import BlackBoxEvaluator
from mpizero.sharding.model import Model
from mpizero.sharding.parameter_access import gather_pieces
from mpizero.sharding.vectors import VectorUpdater
from mpizero.types import Array, BlockModel

METHODS: Mapping[str, type[optim.VectorMethod]] = {
    "l-bfgs": optim.LBFGS,
    "cg": optim.NonlinearCG,
    "newton-cg": optim.NewtonCG,
    "gauss-newton": optim.NewtonCG,
}
#: Options of :func:`minimize` itself; the others are the settings of the method.
_LIMITS = {"maxiter": 15_000, "maxfun": 15_000}


@dataclass(frozen=True)
class MinimizeResult:
    """Hold the result of :func:`minimize`; its attributes have the names of SciPy's ``OptimizeResult``.

    Attributes
    ----------
    fun : float
        Mean loss at the result, plus the regularization terms.
    norm : float
        Largest magnitude of the elements of the gradient of ``fun``; with bounds, of the projected gradient.
    nit, nfev : int
        Numbers of iterations, and of evaluations of loss and gradient.
    success : bool
        Whether the method has converged.
    message : str
        Why the minimization ended.
    model : Model
        The model, whose parameters are the result.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def rosenbrock(parameters, batch):
    ...     a, b = parameters["x"]
    ...     gradient = np.array([-400 * a * (b - a**2) - 2 * (1 - a), 200 * (b - a**2)])
    ...     return 100 * (b - a**2) ** 2 + (1 - a) ** 2, {"x": gradient}, 1.0
    >>> model = mz.FunctionModel({"x": np.array([-1.2, 1.0])}, rosenbrock)
    >>> with mz.distribute(model, None, "ddp") as placed:
    ...     result = mz.minimize(placed, options={"maxiter": 2})
    ...     result.x.size, result.nit, result.success
    (2, 2, False)
    >>> result.message
    'maxiter=2 iterations have been made'
    """

    fun: float
    norm: float
    nit: int
    nfev: int
    success: bool
    message: str
    model: Model = field(repr=False, compare=False)

    @property
    def x(self) -> Array:
        """The parameters of the whole model as a 1-D array in declared order; collective if they are sharded."""
        return self.model.gather_full_parameters().copy()


@explains
def minimize(
    model: Model,
    data: Any = None,
    *,
    method: str | optim.VectorMethod = "l-bfgs",
    bounds: Any = None,
    regularization: Mapping[str, Any] | None = None,
    callback: Callable[[MinimizeResult], object] | None = None,
    options: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
) -> MinimizeResult:
    """Minimize a model's mean loss over all samples by a full-batch method such as L-BFGS.

    Collective over the model's ranks. The model's parameters are the start values, and are replaced by the result.
    The method's vectors are sharded like optimizer state. Iterates have the same bits on any number of ranks, with
    every strategy.

    Parameters
    ----------
    model : Model
        The sharded model, from :func:`~mpizero.distribute`; its optimizer is replaced by the method.
    data : (x, y) arrays, the same on every rank, or a data source, or None
        All samples, of which each rank reads its part once. None stands for one sample, for a function that ignores its
        batch.
    method : {"l-bfgs", "cg", "newton-cg", "gauss-newton"} or VectorMethod
        :class:`~mpizero.optim.LBFGS`, :class:`~mpizero.optim.NonlinearCG` or :class:`~mpizero.optim.NewtonCG`, or an
        instance of one of them. NewtonCG takes Hessian products from the model, ``FunctionModel(product=...)``, if the
        model has them; "gauss-newton" is NewtonCG, and raises an error if the model has no products.
    bounds : pair, dict of str to pair, or None
        As in :class:`~mpizero.optim.LBFGS`; the other methods take no bounds.
    regularization : dict of str to callable, or None
        Terms that are added to the mean loss, as in :class:`~mpizero.optim.VectorMethod`.
    callback : callable or None
        Called on all ranks after every iteration with a :class:`MinimizeResult`, while the model's parameters are the
        iterate. The minimization ends if the callback raises StopIteration on any rank.
    options : dict or None
        "maxiter" and "maxfun", the limits of iterations and evaluations (15,000 by default), and settings of the
        method.
    resume : path or None
        A checkpoint that ``model.save_model`` wrote, in a callback for example: the minimization continues from it.

    Raises
    ------
    ConfigError
        If the method or an option is unknown, a bound or regularization term does not fit the parameters, or ranks pass
        different arguments or data.
    NonFiniteError
        If the loss or its gradient at the start values is infinite or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.distribute(mz.FunctionModel({"x": np.zeros(2)}, bowl), None, "zero1") as model:
    ...     result = mz.minimize(model, method="l-bfgs", options={"gtol": 1e-8})
    ...     print(result.x.round(6), result.success)
    [1. 2.] True
    """
    if not isinstance(model, Model):
        raise ArgumentError(f"minimize takes a placed model, such as mz.distribute returns; got {type(model).__name__}")
    comm = model.mesh.communicator
    with all_ranks(comm):
        limits, optimizer = _settings(model.wrapped_model, method, bounds, regularization, dict(options or {}))
        source = _as_source(data)
    agree_equal(comm, lambda: {"maxiter and maxfun": limits}, "minimize")
    agree_arrays(comm, "minimize", lambda: {"the number of samples": len(source), **compared_samples(source)})
    model._optimizer_class(optimizer).set_model(model)
    if resume is not None:
        model.load_model(resume)
    x, y = full_batch(source, model)
    return _Minimization(model, x, y, callback).run(**limits)


class _Minimization:
    """Run the evaluations that a minimizer needs. Every method is collective over the model's ranks."""

    def __init__(self, model: Model, x: Any, y: Any, callback: Callable[[MinimizeResult], object] | None):
        self._model, self._x, self._y, self._callback = model, x, y, callback
        updater = model._engine.updater
        assert isinstance(updater, VectorUpdater)
        self._updater = updater

    @property
    def _progress(self) -> MethodProgress:
        return self._updater.method.progress

    def run(self, maxiter: int, maxfun: int) -> MinimizeResult:
        """Minimize and return the result; the model's parameters are then the last iterate."""
        self._model._engine.place(iterate=False)
        message = self._reached(maxiter, maxfun)  # a checkpoint may hold the last iteration
        while self._progress.stage != "done" and not message:
            before = self._progress.iterations
            with self._product():
                self._model.train(self._x, self._y)
            if self._progress.iterations > before and self._callback_stops():
                message = "the callback has raised StopIteration"
            else:
                message = self._reached(maxiter, maxfun)
        self._model._engine.place(iterate=True)
        return self._result(self._progress.message or message)

    def _product(self) -> AbstractContextManager[None]:
        """Return a context for the next evaluation, which computes a Hessian product if the method needs one now.

        Collective.
        """
        method, engine = self._updater.optimizer, self._model._engine
        if self._progress.stage != "product" or not method.exact:
            return nullcontext()
        values, layout = self._updater.state[self._progress.along], engine.global_view.layout
        vector = gather_pieces(engine, engine.dtype, lambda piece: values[piece.state : piece.state + piece.size])
        direction = {e.spec.name: e.spec.view(vector[e.span.start : e.span.stop]) for e in layout.parameters}
        evaluator = getattr(engine.runner, "evaluator", None)
        assert isinstance(evaluator, BlackBoxEvaluator), "only functions have products"
        return evaluator.using_product(direction)

    def _reached(self, maxiter: int, maxfun: int) -> str:
        """Return a message that names the limit that is reached; "" if none is."""
        if self._progress.iterations >= maxiter:
            return f"maxiter={maxiter} iterations have been made"
        if self._progress.evaluations >= maxfun:
            return f"maxfun={maxfun} evaluations have been made"
        return ""

    def _callback_stops(self) -> bool:
        """Call the callback with the last iterate as parameters; tell whether it raised StopIteration on any rank."""
        if self._callback is None:
            return False
        stop, comm = False, self._model.mesh.communicator
        self._model._engine.place(iterate=True)
        try:
            self._callback(self._result(self._progress.message))
        except StopIteration:
            stop = True
        self._model._engine.place(iterate=False)
        return bool(agree_on_call(comm, (stop,))[:, 0].any())

    def _result(self, message: str) -> MinimizeResult:
        state = self._progress
        return MinimizeResult(
            state.loss, state.norm, state.iterations, state.evaluations, state.converged, message, self._model
        )


def _settings(
    model: Any, method: Any, bounds: Any, regularization: Any, options: dict[str, Any]
) -> tuple[dict[str, int], optim.VectorMethod]:
    """Return the limits of the minimization, and the method with its settings. Not collective."""
    limits = {
        name: require(f"minimize: options[{name!r}]", options.pop(name, most), whole(1))
        for name, most in _LIMITS.items()
    }
    if isinstance(method, optim.VectorMethod):
        if options or bounds is not None or regularization is not None:
            misplaced = next(iter(options), "bounds" if bounds is not None else "regularization")
            raise ConfigError(f"minimize: {misplaced} is a setting of the method: give it to {type(method).__name__}")
        return limits, method
    if method not in METHODS:
        raise ConfigError(f"minimize: method={method!r:.80}{nearest(method, METHODS)}: expected {', '.join(METHODS)}")
    kind = METHODS[method]
    if kind is optim.NewtonCG:
        offers = callable(getattr(model, "product", None)) and not isinstance(model, BlockModel)
        options.setdefault("exact", offers)
        if method == "gauss-newton" and not (offers and options["exact"]):
            raise ConfigError(
                "minimize: method='gauss-newton' needs products of the model, FunctionModel(..., product=...), and no "
                "options['exact'] = False; 'newton-cg' takes differences of gradients where there are none"
            )
    known = {f.name for f in fields(kind)}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(
            f"minimize: options[{unknown[0]!r}] is unknown{nearest(unknown[0], known)}: {method!r} has "
            f"{', '.join(sorted(known - {'bounds', 'regularization'}))}, maxiter, maxfun"
        )
    if regularization is not None:
        options["regularization"] = regularization
    if bounds is not None:
        if "bounds" not in known:
            raise ConfigError(f"minimize: method={method!r} has no bounds; 'l-bfgs' has")
        options["bounds"] = bounds
    return limits, kind(**options)


def _as_source(data: Any) -> Any:
    if data is None:
        return ArraySource(np.zeros((1, 1)), np.zeros((1, 1)))
    return ArraySource(*data) if isinstance(data, tuple) else data
