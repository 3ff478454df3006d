"""Evaluate the samples of a bad step again, in one process, and compute statistics of every array."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.pytree import SampleTree, paths_of
from mpizero.errors import ConfigError
from mpizero.layout.flat import Unit, joined
from mpizero.parallel.diagnostics.bad_steps import BadStep, read_bad_step
from mpizero.parallel.execution.black_box import BlackBoxEvaluator
from mpizero.parallel.execution.evaluators import BlockEvaluator, Evaluator
from mpizero.parallel.gradients.gradient_views import GradientViews
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.parameters.store import flat_names
from mpizero.types import EVALUATE, Array, Loss, Params, Run


@dataclass(frozen=True)
class ReplayedArray:
    """Hold statistics of one array of a replay.

    Attributes
    ----------
    what : str
        Kind of the array: "parameter", "input", "output" (of a block), "loss", "gradient of output" (of a block) or
        "gradient" (of a parameter).
    name : str
        Name of the block or parameter. For an input, its path in ``x``; "loss" for the loss.
    minimum, maximum : float
        Smallest and largest finite value; NaN if there are none.
    norm : float
        Square root of the sum of squares of the finite values.
    not_finite, size : int
        Number of values that are infinite or NaN, and number of all values.
    """

    what: str
    name: str
    minimum: float
    maximum: float
    norm: float
    not_finite: int
    size: int

    @classmethod
    def of(cls, what: str, name: str, values: Any) -> ReplayedArray:
        """Compute the statistics of ``values``; a complex value counts as two numbers. Not collective."""
        flat = np.asarray(values).reshape(-1)
        flat = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
        finite = flat if flat.dtype.kind in "iub" else flat[np.isfinite(flat)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
        norm = float(np.sqrt(np.square(finite, dtype=np.float64).sum()))
        return cls(what, name, low, high, norm, flat.size - finite.size, flat.size)


@dataclass(frozen=True)
class Replay:
    """Hold statistics of all arrays in the forward and backward pass of one micro-batch.

    Attributes
    ----------
    start, stop : int
        Half-open range of the micro-batch's samples in the global batch.
    loss, weight : float
        Sum of the losses of these samples, and their total weight.
    figures : tuple of ReplayedArray
        Statistics of the parameters, then of all other arrays in the order in which they were computed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.ShardingConfig(comm="self", micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.dump_bad_step(model, (x, y), "bad_steps")
    ...     replay = mz.replay_bad_step(folder, model)[0]
    >>> replay.start, replay.stop, replay.first.what, replay.first.name
    (1, 2, 'input', 'x')
    """

    start: int
    stop: int
    loss: float
    weight: float
    figures: tuple[ReplayedArray, ...]

    @property
    def first(self) -> ReplayedArray | None:
        """The statistics of the first array with infinite or NaN values; None if there is no such array."""
        return next((figures for figures in self.figures if figures.not_finite), None)


def replay_bad_step(step: BadStep | str | os.PathLike[str], model: ShardedModelBase) -> list[Replay]:
    """Run the samples of a bad step forward and backward; return statistics of all arrays, by micro-batch.

    Not collective: ``model`` is on one process. The pass uses the parameters of ``model`` and does not change them. The
    samples are cut into the same micro-batches as in training, with the same dropout.

    Parameters
    ----------
    step : BadStep or path
        The bad step, or the folder that :func:`dump_bad_step` wrote.
    model : sharded model
        A model on a communicator of one rank, with the parameters to use.

    Returns
    -------
    list of Replay
        One for each micro-batch of the bad grains, in order.

    Raises
    ------
    ConfigError
        If the model is on several ranks.
    DataError
        If the files of the step are damaged.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.ShardingConfig(comm="self", micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.dump_bad_step(model, (x, y), "bad_steps")
    ...     first = mz.replay_bad_step(folder, model)[0].first  # the first array that is not finite
    >>> first.what, first.not_finite
    ('input', 1)
    """
    if model.world_size != 1:
        raise ConfigError(
            f'a replay runs in one process, the model is on {model.world_size}: use ShardingConfig(comm="self")'
        )
    step = step if isinstance(step, BadStep) else read_bad_step(step)
    result = []
    for grain in step.grains:
        for at in range(0, len(grain.samples), step.micro_batch):
            part = slice(at, at + step.micro_batch)
            samples = grain.samples[part]
            run = Run(True, step.seed, step.run_step, int(samples[0]), count=len(samples), epoch=step.epoch)
            trace = _Trace(model, step.loss_scale)
            x, y = SampleTree.of(x=grain.x, y=grain.y).cut(part)
            loss, weight = trace.follow(x, y, run)
            result.append(Replay(run.first_sample, int(samples[-1]) + 1, loss, weight, tuple(trace.figures)))
    return result


class _Trace:
    """Run one micro-batch forward and backward, and record the statistics of every array."""

    def __init__(self, model: ShardedModelBase, loss_scale: float) -> None:
        self.model, self.engine, self.loss_scale = model, model.engine, loss_scale
        self.figures: list[ReplayedArray] = []
        self._views = GradientViews(self.engine.layout, self.engine.memory, self.engine.dtype, self.engine.integers)
        self._targets: dict[int, Any] = {}
        self._frozen = {entry.spec.name for entry in self.engine.layout.entries if entry.gradient < 0}

    def note(self, what: str, name: str, values: Any) -> None:
        """Record the statistics of ``values``, an array or every array of a tree; do nothing if it is None."""
        for path, leaf in paths_of(**{name: values}):
            self.figures.append(ReplayedArray.of(what, path, leaf))

    def follow(self, x: Any, y: Any, run: Run) -> tuple[float, float]:
        """Run one micro-batch forward and backward; return its loss sum and weight."""
        for entry in self.engine.layout.parameters:
            self.note("parameter", entry.spec.name, self.engine.store.values[entry.span.start : entry.span.stop])
        for path, leaf in SampleTree.of(x=x).named:
            self.note("input", path, leaf)
        at = len(self.figures)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            loss, weight = self._evaluator().gradients(x, y, run, self._target, self._done)
        if not self.engine.block_model:  # which has given all at once: the loss is where to look first
            self.figures.insert(at, ReplayedArray.of("loss", "loss", loss))
        return loss, weight

    def note_gradients(self, block: str, views: Any) -> None:
        """Record the statistics of the gradients of a block's trainable parameters."""
        for name, view in flat_names(views):
            if joined(block, name) not in self._frozen:
                self.note("gradient", joined(block, name), view)

    def _evaluator(self) -> Evaluator:
        engine = self.engine
        if not engine.block_model:
            return BlackBoxEvaluator(engine.model, engine.store)
        evaluator = BlockEvaluator(engine.model, engine.store, lambda: self.loss_scale)
        before, blocks = None, dict[str, Any](evaluator.blocks)
        for name, block in blocks.items():
            blocks[name] = _RecordedLayer(block, name, before, self)
            before = name
        evaluator.blocks = blocks
        evaluator.criterion = _RecordedLoss(evaluator.criterion, before or "x", self)
        return evaluator

    def _target(self, unit: Unit) -> Any:
        self._targets[unit.index] = self._views.unit(unit, np.zeros(unit.gradients, self.engine.dtype))
        return self._targets[unit.index]

    def _done(self, unit: Unit) -> None:
        views = self._targets.pop(unit.index, None)  # None: a layer has raised, and the units before it end without any
        if views is not None and not self.engine.block_model:  # gradients of a layer are recorded when it gives them
            for block in reversed(unit.blocks):
                self.note_gradients(block, views[block])


class _RecordedLayer:
    """Wrap a block of the model, and record its output and its gradients in a trace."""

    def __init__(self, block: Any, name: str, before: str | None, trace: _Trace) -> None:
        self.block, self.name, self.before, self.trace = block, name, before, trace

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the block forward, record its output, and return output and cache. Not collective."""
        y, cache = self.block.forward(params, x, run)
        self.trace.note("output", self.name, y)
        return y, cache

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Run the block backward, record its gradients, and return the gradient of its input. Not collective.

        That is recorded as the gradient of the previous block's output. It is None if the block's input has none.
        """
        d: Array | None = self.block.backward(params, cache, dy, grads)
        self.trace.note_gradients(self.name, grads)
        if self.before is not None:
            self.trace.note("gradient of output", self.before, d)
        return d


class _RecordedLoss:
    """Wrap a loss layer, and record its loss and its gradient in a trace."""

    def __init__(self, loss: Loss, before: str, trace: _Trace) -> None:
        self.loss, self.before, self.trace = loss, before, trace

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Compute and record the loss; return loss sum, weight and the cache for ``backward``. Not collective."""
        loss, weight, cache = self.loss.forward(prediction, target)
        self.trace.note("loss", "loss", loss)
        return loss, weight, cache

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Compute, record and return the gradient of the loss by the prediction. Not collective.

        ``scale`` is the loss scale, by which the gradient is multiplied.
        """
        d = self.loss.backward(cache, scale)
        self.trace.note("gradient of output", self.before, d)
        return d
