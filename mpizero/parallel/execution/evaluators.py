"""Compute loss and gradients of one micro-batch: what runners rely on, and how a model of blocks does it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from mpizero._util.checks import loss_and_weight
from mpizero.errors import CollectiveError, PeerFailure
from mpizero.layout.flat import Unit
from mpizero.nn.layer import add_location, call_located
from mpizero.parallel.parameters.store import ParameterProvider
from mpizero.types import EVALUATE, BlockModel, Run

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


def with_next(units: Iterable[Unit]) -> Iterator[tuple[Unit, Unit | None]]:
    """Yield each unit together with the unit after it; the last unit comes with None. Not collective."""
    listed = list(units)
    return zip(listed, [*listed[1:], None], strict=True) if listed else iter(())
