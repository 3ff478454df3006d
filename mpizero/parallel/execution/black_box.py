"""Compute loss and gradients of one micro-batch of a black box, a function of all parameters at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mpizero._util.checks import (
    check_names,
    gradient,
    loss_and_weight,
    loss_arguments,
    named,
    take_integers,
    takes_run,
    writes_in_place,
)
from mpizero._util.pytree import map_arrays, map_leaves
from mpizero.errors import CollectiveError, LayoutError, PeerFailure, UnsupportedError
from mpizero.layout.flat import joined
from mpizero.parallel.execution.evaluators import BlockEnded, GradientTarget, UnitDone, with_next
from mpizero.parallel.gradients.unwritten_gradients import FunctionGradients
from mpizero.parallel.parameters.store import ParameterStore, flat_names
from mpizero.types import Array, BlackBoxModel, Run


class BlackBoxEvaluator:
    """Evaluate a black box: a function that needs all parameters at once and computes all gradients together.

    It returns the gradients or, if ``in_place``, writes them into the arrays that it is given. "Collective if sharded"
    in the methods means: over the data group, if parameters or gradients are sharded.
    """

    def __init__(self, model: BlackBoxModel, store: ParameterStore) -> None:
        self.model, self.store = model, store
        self.units = store.layout.units
        self.frozen = frozenset(e.spec.name for e in store.layout.entries if not e.spec.trainable)
        self.trained = {e.spec.name: None for e in store.layout.entries if e.spec.trainable}.keys()
        self.integers = frozenset(() if store.integers is None else store.integers.values)
        self.in_place = writes_in_place(model)
        given = loss_arguments(in_place=self.in_place)
        self._takes_run = takes_run(model.loss_and_grad, "loss_and_grad", *given)
        self._unread: dict[str, Array] = {}
        self._direction: Mapping[str, Array] | None = None
        # Only if the attribute is True: a user's class may have a method loss that returns a mean, for example.
        users: Any = model
        loss = users.loss if getattr(model, "has_loss", False) is True else None
        self._own_loss = None if loss is None else (loss, takes_run(loss, "loss", "parameters", "batch"))

    def gradients(
        self, x: Any, y: Any, run: Run, target: GradientTarget, done: UnitDone, ended: BlockEnded | None = None
    ) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Collective if sharded. :meth:`Evaluator.gradients` describes the parameters. ``ended`` is never called, because
        the function returns all gradients together.
        """
        left, function = deque(reversed(self.units)), self._function
        params = self._parameters()
        try:
            places = {unit.index: _named(target(unit)) for unit in self.units if self.in_place}
            views = {name: view for place in places.values() for name, view in place}
            begun = self.store.timeline.begin()
            loss, grads, weight = self._loss_and_grad(params, x, y, run, views)
            self.store.timeline.end("backward", "loss and gradient", begun)
            del params
            writes = self.in_place and self._direction is None
            if not writes:
                check_names(function, grads, self.trained, self.frozen | self.integers)
            while left:
                for name, view in () if writes else places.get(left[0].index) or _named(target(left[0])):
                    if name in self.integers:
                        take_integers(function, name, grads.get(name, view), view, run)
                    elif name not in self.frozen:
                        view[...] = gradient(function, name, grads[name], view, run)
                done(left.popleft())
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            for unit in left:
                done(unit)
            raise
        return loss, weight

    def absent(self, done: UnitDone) -> None:
        """Join the gathers and reductions of a micro-batch that only other ranks have. Collective if sharded."""
        self._parameters()
        for unit in reversed(self.units):
            done(unit)

    def predict(self, x: Any) -> Any:
        """Return what the model's ``predict`` returns for ``x``; None if ``x`` is None. Collective if sharded."""
        params = self._parameters()
        if x is None:
            return None
        predict = getattr(self.model, "predict", None)
        if predict is None:
            kind = type(self.model).__name__
            raise UnsupportedError(f"{kind} has no predict function: give one, {kind}(..., predict=...)")
        with _explained("predict"):
            result = predict(params, _read_only(x))
        return map_leaves(self._own, result)

    def _own(self, result: Any) -> Any:
        """Return a copy of ``result`` if it is a view of the parameters, else ``result`` itself."""
        shared = isinstance(result, np.ndarray) and np.may_share_memory(result, self.store.values)
        return result.copy() if shared else result

    def loss(self, x: Any, y: Any, run: Run) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight, and None in place of a prediction. Collective if sharded."""
        params = self._parameters()
        if x is None and y is None:
            return 0.0, 0.0, None
        if self._own_loss is None:
            loss, _, weight = self._loss_and_grad(params, x, y, run, self._unread_gradients())
            return loss, weight, None
        function, takes = self._own_loss
        with _explained("loss"):
            result = function(params, (_read_only(x), _read_only(y)), **({"run": run} if takes else {}))
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayoutError(f"loss must return (loss_sum, weight), it returned {_kinds(result)}")
        return *loss_and_weight(function, *result, run, "loss"), None

    @contextmanager
    def using_loss(self, loss: Any) -> Iterator[None]:
        """Raise ``UnsupportedError`` if ``loss`` is not None, because a black box contains its loss. Not collective."""
        if loss is not None:
            raise UnsupportedError("a black box computes its own loss: another one cannot be put in its place")
        yield

    @contextmanager
    def using_product(self, direction: Mapping[str, Array] | None) -> Iterator[None]:
        """Compute the model's ``product`` with ``direction`` in place of gradients in the context; None: gradients.

        Not collective. The sum of losses is 0 then.
        """
        self._direction = direction
        try:
            yield
        finally:
            self._direction = None

    @property
    def _function(self) -> Callable[..., Any]:
        """The user's function that is called for gradients, or for products with a direction."""
        function: Callable[..., Any] = self.model.loss_and_grad
        return function if self._direction is None else self.model.product  # type: ignore[attr-defined]

    def _parameters(self) -> dict[str, Any]:
        """Return all parameters by name: views of the store, or copies if they are sharded. Collective if sharded."""
        with ExitStack() as stack:
            if not self.store.sharded:
                provided = [(unit, stack.enter_context(self.store.unshard(unit))) for unit in self.units]
                return {n: a for unit, params in provided for n, a in _named(params)}
            found: dict[str, Any] = {}
            for unit, following in with_next(self.units):
                with self.store.unshard(unit, following) as params:
                    found.update((n, _read_only(a.copy())) for n, a in _named(params))
                self.store.memory.barrier("black box")
            return found

    def _unread_gradients(self) -> dict[str, Array]:
        """Return arrays for gradients that nobody reads: of a function in place that computes a loss. Not collective.

        They are allocated when they are first needed, which is never if the model has a function for the loss alone.
        """
        if self.in_place and not self._unread:
            buffer = self.store.memory.private("buffers", self.store.layout.size, self.store.dtype)
            entries = self.store.layout.parameters
            self._unread = {e.spec.name: e.spec.view(buffer[slice(*e.span)]) for e in entries}
            if self.store.integers is not None:
                self._unread |= {name: value.copy() for name, value in self.store.integers.values.items()}
        return self._unread

    def _loss_and_grad(
        self, params: Mapping[str, Any], x: Any, y: Any, run: Run, views: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array], float]:
        """Call the function; return the sum of losses, the gradients and the weight. Not collective.

        A function in place writes its gradients into ``views``; in its place ``views`` are returned.
        """
        if self._direction is not None:
            return self._product(params, x, y, self._direction)
        given, told = (params, (_read_only(x), _read_only(y))), {"run": run} if self._takes_run else {}
        function: Callable[..., Any] = self.model.loss_and_grad
        if not self.in_place:
            with _explained("loss_and_grad"):
                result = function(*given, **told)
            if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping):
                expected = "(loss_sum, gradients by name, weight)"
                raise LayoutError(f"loss_and_grad must return {expected}, it returned {_kinds(result)}")
            loss, weight = loss_and_weight(function, result[0], result[2], run)
            return loss, result[1], weight
        with _explained("loss_and_grad", kept=", and so are the gradients of an earlier call"), writable(views) as own:
            result = function(*given, own, **told)
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} works in place, so it must return (loss_sum, weight) and write "
                f"the gradients into its third argument; it returned {_kinds(result)}"
            )
        loss, weight = loss_and_weight(function, *result, run)
        return loss, views, weight

    def _product(
        self, params: Mapping[str, Any], x: Any, y: Any, direction: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array], float]:
        """Call the model's ``product``; return 0 in place of a loss, the products and the weight. Not collective."""
        with _explained("product"):
            result = self._function(params, (_read_only(x), _read_only(y)), direction)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Mapping):
            raise LayoutError(f"product must return (products by name, weight), it returned {_kinds(result)}")
        loss, weight = loss_and_weight(self._function, 0.0, result[1], None, "product")
        return loss, result[0], weight


def _kinds(result: Any) -> Any:
    return [type(v).__name__ for v in result] if isinstance(result, tuple) else type(result).__name__


def _read_only(value: Any) -> Any:
    """Return ``value``, an array or nested structure, with every array replaced by a read-only view of it."""
    if not isinstance(value, np.ndarray):
        return map_arrays(_read_only, value)
    view = value.view()
    view.flags.writeable = False
    return view


@contextmanager
def writable(views: Mapping[str, Array]) -> Iterator[FunctionGradients]:
    """Yield ``views`` as arrays that can be written to inside the context only: a later write raises an error.

    Not collective. It would come from a function that keeps the arrays of one call, and write where other gradients
    stand by then.
    """
    own = FunctionGradients({name: view.view() for name, view in views.items()})
    written = list(own.values())
    try:
        yield own
    finally:
        for view in written:
            view.flags.writeable = False


@contextmanager
def _explained(function: str, kept: str = "") -> Iterator[None]:
    """Add advice to the error that the user's function, named ``function``, raises on writing to a read-only array."""
    try:
        yield
    except (ValueError, TypeError, BufferError) as error:
        if any(word in str(error) for word in ("read-only", "readonly", "writable", "writeable")):
            told = f"The arrays that {function} gets are read-only{kept}"
            error.add_note(f"{told}: let it copy what it changes, x = x.copy()")
        raise


def _named(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(joined(b, n), array) for b, tree in params.items() for n, array in flat_names(tree)]
