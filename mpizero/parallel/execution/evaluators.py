"""Compute loss and gradients of one micro-batch, for models of blocks (unit by unit) and for black boxes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from mpizero.errors import CollectiveError, LayoutError, PeerFailure, UnsupportedError
from mpizero.layout import Unit
from mpizero.layout.flat import joined
from mpizero.nn.error_location import add_location, call_located
from mpizero.parallel.parameters.store import ParameterProvider, ParameterStore, flat_names
from mpizero.parallel.return_checks import check_names, gradient, loss_and_weight
from mpizero.sampletree import map_arrays, map_leaves
from mpizero.signatures import takes_run
from mpizero.types import EVALUATE, BlackBoxModel, BlockModel, Run

#: Returns the views that a unit's gradients are written to.
GradientTarget = Callable[[Unit], Mapping[str, Any]]
#: Called when a unit's gradients are complete.
UnitDone = Callable[[Unit], None]
#: Called when a block's gradients are complete, before those of its whole unit, with the gradient of the block's input;
#: returns the latter, to be passed to the block before. Black boxes never call it.
BlockEnded = Callable[[Unit, str, Any], Any]


class Evaluator(Protocol):
    """Run a model's forward and backward passes with parameters that a store provides unit by unit."""

    @property
    def store(self) -> ParameterProvider:
        """The object that provides the parameters."""

    def gradients(
        self, x: Any, y: Any, run: Run, target: GradientTarget, done: UnitDone, ended: BlockEnded | None = None
    ) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Parameters
        ----------
        x, y : array or nested structure
            Samples and targets of the micro-batch.
        run : Run
            What the forward pass gets besides ``x``.
        target : callable
            Returns the views that the gradients of a unit are written to.
        done : callable
            Called with each unit when all its gradients are written.
        ended : callable, optional
            Called with each unit and block when the gradients of the block are written.
        """

    def absent(self, done: UnitDone) -> None:
        """Join the gathers and reductions of a micro-batch that other ranks compute while this rank has none.

        ``done`` is called for every unit, as by :meth:`gradients`.
        """

    def predict(self, x: Any) -> Any:
        """Return the model's output for ``x``; if ``x`` is None, only join the gathers, and return None."""

    def loss(self, x: Any, y: Any, run: Run) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction, without computing gradients."""

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` instead of the model's own loss inside the context."""


class _Passage:
    """Track the collectives that a rank still has to join in one forward and backward pass.

    They are the gathers of the units' parameters, and the reductions when a unit's backward pass ends. A rank whose
    computation fails, or that has no micro-batch, still joins all of them, so that no other rank waits for it. If
    ``done`` is None, there is a forward pass only.
    """

    def __init__(self, store: ParameterProvider, units: Sequence[Unit], done: UnitDone | None) -> None:
        self.store, self.report = store, done
        backward = list(reversed(units)) if done is not None else []
        self.gathers = deque([*units, *backward])
        self.ends = deque(backward)

    def unit(self, unit: Unit) -> AbstractContextManager[dict[str, Any]]:
        """Gather ``unit`` and begin to gather the unit after it; return a context that yields the unit's parameters.

        Collective over the data group if parameters are sharded.
        """
        self.gathers.popleft()
        following = self.gathers[0] if self.gathers else None
        return self.store.unshard(unit, following, by_block=self.report is not None)

    def done(self, unit: Unit) -> None:
        """Report that the unit's backward pass has ended. Collective over the data group if gradients are sharded."""
        self.ends.popleft()
        if self.report is not None:
            self.report(unit)

    def finish(self) -> None:
        """Join all remaining collectives without computing.

        Collective over the data group if parameters or gradients are sharded.
        """
        while self.gathers or self.ends:
            if len(self.ends) > len(self.gathers):  # a unit gathered for its backward, which has not ended
                self.done(self.ends[0])
                continue
            with self.unit(self.gathers[0]):
                pass


class BlockEvaluator:
    """Evaluate a model of blocks, unit by unit.

    If parameters are sharded, a unit is gathered before its forward pass and freed afterwards, and again for its
    backward pass. ``loss_scale`` returns the current loss scale. ``run_on`` adds the length of sequences to the ``Run``
    of a micro-batch ``x``. "Collective if sharded" in the methods means: over the data group, if parameters or
    gradients are sharded.
    """

    def __init__(
        self,
        model: BlockModel,
        store: ParameterProvider,
        loss_scale: Callable[[], float],
        run_on: Callable[[Any, Run], Run] = lambda x, run: run,
    ) -> None:
        self.model, self.store, self.loss_scale, self.run_on = model, store, loss_scale, run_on
        self.criterion = model.loss
        self.blocks = dict(model.blocks)
        self.units = store.layout.units

    def gradients(
        self, x: Any, y: Any, run: Run, target: GradientTarget, done: UnitDone, ended: BlockEnded | None = None
    ) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Collective if sharded. If a layer raises, this rank first joins the remaining collectives, then raises the
        error. :meth:`Evaluator.gradients` describes the parameters.
        """
        caches: dict[str, Any] = {}
        d: Any
        passed, clock = _Passage(self.store, self.units, done), self.store.timeline
        try:
            run = self.run_on(x, run)
            for unit in self.units:
                with passed.unit(unit) as params:
                    for block in unit.blocks:
                        self.store.wait(block)
                        begun = clock.begin()
                        try:
                            x, caches[block] = self.blocks[block].forward(params[block], x, run)
                        except Exception as error:
                            add_location(error, "block", block, self.blocks[block].forward)
                            raise
                        clock.end("forward", block, begun)
                        self.store.progress.poll()
            begun = clock.begin()
            loss, weight, cache = self.criterion.forward(x, y)
            loss, weight = loss_and_weight(self.criterion.forward, loss, weight, run)
            clock.end("forward", "loss", begun)
            begun = clock.begin()
            d = self.criterion.backward(cache, self.loss_scale())
            clock.end("backward", "loss", begun)
            for unit in reversed(self.units):
                with passed.unit(unit) as params:
                    grads = target(unit)
                    for block in reversed(unit.blocks):
                        self.store.wait(block)
                        begun = clock.begin()
                        try:
                            d = self.blocks[block].backward(params[block], caches.pop(block), d, grads[block])
                        except Exception as error:
                            add_location(error, "block", block, self.blocks[block].backward)
                            raise
                        clock.end("backward", block, begun)
                        self.store.progress.poll()
                        if ended is not None:
                            d = ended(unit, block, d)
                passed.done(unit)
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            passed.finish()
            raise
        return loss, weight

    def absent(self, done: UnitDone) -> None:
        """Join the gathers and reductions of a micro-batch that only other ranks have. Collective if sharded."""
        _Passage(self.store, self.units, done).finish()

    def predict(self, x: Any, run: Run = EVALUATE) -> Any:
        """Return the last block's output for ``x``; if ``x`` is None, only join the gathers. Collective if sharded."""
        passed = _Passage(self.store, self.units, None)
        try:
            run = EVALUATE if x is None else self.run_on(x, run)
            for unit in self.units:
                with passed.unit(unit) as params:
                    for block in unit.blocks:
                        if x is not None:
                            x, _ = call_located("block", block, self.blocks[block].forward, params[block], x, run)
                            self.store.progress.poll()
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            passed.finish()
            raise
        return x

    def loss(self, x: Any, y: Any, run: Run) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the last block's output; if ``x`` is None, 0.0, 0.0 and None.

        Collective if sharded.
        """
        prediction = self.predict(x, run)
        if prediction is None:
            return 0.0, 0.0, None
        loss, weight, _ = self.criterion.forward(prediction, y)
        return *loss_and_weight(self.criterion.forward, loss, weight), prediction

    @contextmanager
    def using_loss(self, loss: Any) -> Iterator[None]:
        """Use ``loss`` in place of the model's own loss inside the context; None keeps the own one. Not collective."""
        own = self.criterion
        self.criterion = own if loss is None else loss
        try:
            yield
        finally:
            self.criterion = own


class BlackBoxEvaluator:
    """Evaluate a black box: a function that needs all parameters at once and returns all gradients together.

    "Collective if sharded" in the methods means: over the data group, if parameters or gradients are sharded.
    """

    def __init__(self, model: BlackBoxModel, store: ParameterStore) -> None:
        self.model, self.store = model, store
        self.units = store.layout.units
        self.frozen = frozenset(e.spec.name for e in store.layout.entries if not e.spec.trainable)
        self.trained = {e.spec.name: None for e in store.layout.entries if e.spec.trainable}.keys()
        self._takes_run = takes_run(model.loss_and_grad, "loss_and_grad", "parameters", "batch")
        self._own_loss = _loss_function(model)

    def gradients(
        self, x: Any, y: Any, run: Run, target: GradientTarget, done: UnitDone, ended: BlockEnded | None = None
    ) -> tuple[float, float]:
        """Compute a micro-batch's gradient of the sum of losses, and return the sum of losses and the weight.

        Collective if sharded. :meth:`Evaluator.gradients` describes the parameters. ``ended`` is never called, because
        the function returns all gradients together.
        """
        left, function = deque(reversed(self.units)), self.model.loss_and_grad
        params = self._parameters()
        try:
            begun = self.store.timeline.begin()
            loss, grads, weight = self._loss_and_grad(params, x, y, run)
            self.store.timeline.end("backward", "loss and gradient", begun)
            del params
            check_names(function, grads, self.trained, self.frozen)
            while left:
                for block, views in target(left[0]).items():
                    for name, view in flat_names(views):
                        if (parameter := joined(block, name)) not in self.frozen:
                            view[...] = gradient(function, parameter, grads[parameter], view, run)
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
            raise UnsupportedError(
                f"{type(self.model).__name__} has no predict function: give one, FunctionModel(..., predict=...)"
            )
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
            loss, _, weight = self._loss_and_grad(params, x, y, run)
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

    def _loss_and_grad(
        self, params: Mapping[str, Any], x: Any, y: Any, run: Run
    ) -> tuple[float, Mapping[str, Any], float]:
        function = self.model.loss_and_grad
        with _explained("loss_and_grad"):
            result = function(params, (_read_only(x), _read_only(y)), **({"run": run} if self._takes_run else {}))
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[1], Mapping):
            told = "(loss_sum, gradients by name, weight)"
            raise LayoutError(f"loss_and_grad must return {told}, it returned {_kinds(result)}")
        loss, weight = loss_and_weight(function, result[0], result[2], run)
        return loss, result[1], weight


def _loss_function(model: Any) -> tuple[Callable[..., Any], bool] | None:
    """Return the model's function that computes the loss without gradients, and whether it takes an argument ``run``.

    Return None if the model's attribute ``has_loss`` is not True: a user's class may have a method ``loss`` that
    returns something else, a mean for example.
    """
    function = model.loss if getattr(model, "has_loss", False) is True else None
    return None if function is None else (function, takes_run(function, "loss", "parameters", "batch"))


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
def _explained(function: str) -> Iterator[None]:
    """Add advice to the error that the user's function, named ``function``, raises on writing to a read-only array."""
    try:
        yield
    except (ValueError, TypeError, BufferError) as error:
        if any(word in str(error) for word in ("read-only", "readonly", "writable", "writeable")):
            error.add_note(f"The arrays that {function} gets are read-only: let it copy what it changes, x = x.copy()")
        raise


def with_next(units: Iterable[Unit]) -> Iterator[tuple[Unit, Unit | None]]:
    """Yield each unit together with the unit after it; the last unit comes with None. Not collective."""
    listed = list(units)
    return zip(listed, [*listed[1:], None], strict=True) if listed else iter(())


def _named(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(joined(b, n), array) for b, tree in params.items() for n, array in flat_names(tree)]
