"""Run a training on several layouts, as threads or on the ranks of a communicator, and compare it with one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import SampleTree
from mpizero._util.text import Rounding
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import communicator_of, default_world
from mpizero.comm.threads import run_in_threads
from mpizero.errors import ConfigError
from mpizero.layout import Grains
from mpizero.optim import SGD
from mpizero.sharding import ShardingConfig
from mpizero.sharding.partition import own_reasons, shown_tiles
from mpizero.train.verify.layouts import ONE_PROCESS, Layout, each_once
from mpizero.train.verify.pair import UNREPEATED, TrainingPair
from mpizero.train.verify.training import Feed, Key, ObservedTraining, TrainingTask, placed
from mpizero.train.verify.verdicts import Finding, Report, Verdict

#: A function ``progress(layout, step)`` that is called on rank 0 after every step.
Progress = Callable[[str, int], None]


class ReferenceTrace(NamedTuple):
    """Hold what a training in one process computed.

    ``steps`` has the loss, the gradient norm and the hashes of all tensors for the start and for each step (loss and
    norm are None for the start). ``sha256`` is the hash of the last parameters. ``rounding`` bounds rounding errors,
    for the training's dtype and length of sums. ``own_reasons`` tells whether layers say that their bits depend on the
    size of groups.
    """

    rounding: Rounding
    steps: list[tuple[float | None, float | None, dict[Key, bytes]]]
    sha256: str
    seconds: float
    own_reasons: bool


def compare_layouts(
    make_model: Callable[[Communicator], Any],
    batches: Sequence[tuple[Any, Any]] | Feed,
    layouts: Sequence[str | Layout],
    *,
    make_optimizer: Callable[[], Any] = lambda: SGD(lr=0.01),
    comm: Any = None,
    steps: int | None = None,
    tolerance: float | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Run the same training on several layouts, and name the first number in each that differs from one process.

    Collective over ``comm``. After every step the loss, the gradient norm and hashes of parameters (as each rank sees
    them) and optimizer arrays are compared with one process that computes in the same tiles. If something differs, the
    training is run once more up to that step, and all that it computes is compared in order, from loss to parameters.
    Where no process can compute in these tiles, all is compared in every step, within a tolerance.

    Parameters
    ----------
    make_model : callable
        ``make_model(comm)`` returns a new model; ``comm`` are the layout's ranks, for models that communicate.
    batches : sequence of (x, y), or callable
        Global batches, the same on every rank, or ``batches(config, group)``, which yields this rank's part of each.
    layouts : sequence of str
        Names such as "2", "zero3*4", "pipeline=2, data=2", "tensor=2"; docs/verify.md explains them.
    make_optimizer : callable
        Returns a new optimizer; the default is plain SGD.
    comm : mpi4py communicator, Communicator, "self" or None
        Each layout runs on the first ranks of ``comm``. With "self" the ranks of a layout are threads of this process,
        without MPI. None means all ranks of the job, or "self" if no launcher has started several ranks.
    steps : int or None
        Number of steps to compare; None for all of a sequence of batches.
    tolerance : float or None
        Relative difference allowed for layouts whose tiles no process can compute, such as groups of 3 ranks. None
        computes it from the dtype and the length of sums: 16 epsilon for every doubling of the length.
    progress : callable or None
        ``progress(layout, step)`` is called on rank 0 after every step.
    **settings
        Settings of :class:`~mpizero.ShardingConfig`: ``micro_batch``, ``clip``, ...

    Returns
    -------
    Report
        The verdicts on all layouts, the same on every rank.

    Raises
    ------
    ConfigError
        If a layout's name is not understood, or the layout needs more ranks than ``comm`` has.

    Examples
    --------
    >>> import mpizero as mz
    >>> batch = mz.data.digits().samples(range(8))
    >>> mz.testing.compare_layouts(lambda comm: mz.nn.MLP(64, [4], 10), [batch], ["zero3*2"], comm="self").agrees
    True
    """
    return _compare_on(comm, _task(make_model, batches, make_optimizer, steps, settings), layouts, tolerance, progress)


def _compare_on(
    comm: Any, task: TrainingTask, layouts: Sequence[str | Layout], tolerance: float | None, progress: Progress | None
) -> Report:
    given = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    chosen = each_once(given, task.settings.get("tiles"))
    comm = default_world() if comm is None else comm
    with nullcontext() if comm is None or comm == "self" else communicator_of(comm) as world:
        return _compare(task, chosen, world, tolerance, progress)


def _task(
    make_model: Any, batches: Any, make_optimizer: Any, steps: int | None, settings: Mapping[str, Any]
) -> TrainingTask:
    if callable(batches):
        if steps is None:
            raise ConfigError("steps: say how many to compare, where batches is a function")
        return TrainingTask(make_model, make_optimizer, batches, steps, settings)
    count = len(batches) if steps is None else min(steps, len(batches))
    return TrainingTask(make_model, make_optimizer, _samples_of_rank(batches), count, settings)


def _samples_of_rank(batches: Sequence[tuple[Any, Any]]) -> Feed:
    """Return a feed that gives each rank its samples of each global batch."""

    def feed(config: ShardingConfig, group: Communicator) -> Iterator[tuple[Any, Any]]:
        for x, y in batches:
            tree = SampleTree.of(x=x, y=y)
            count = tree.count()
            yield tree.cut(Grains(count, config.grain_size(count)).samples_of(group.rank, group.size))

    return feed


def _compare(
    task: TrainingTask,
    layouts: Sequence[Layout],
    world: Communicator | None,
    tolerance: float | None,
    progress: Progress | None,
) -> Report:
    for layout in layouts:
        if world is not None and layout.ranks > world.size:
            raise ConfigError(f"layout {str(layout)!r} needs {layout.ranks} ranks, this job has {world.size}")
    tell: Progress = progress if progress is not None and (world is None or world.rank == 0) else _silent
    traces: dict[str, ReferenceTrace] = {}
    verdicts = list[Verdict]()
    for layout in [ONE_PROCESS.in_tiles(task.settings.get("tiles")), *layouts]:
        if (key := str(layout.alone.parallel.tiles)) not in traces:
            with _named(layout):
                traces[key] = _on_first(world, partial(record, task, layout.alone, tell))
        trace = traces[key]
        if not verdicts:
            verdicts.append(Verdict("one process", 1, task.steps, trace.sha256, trace.seconds))
            continue
        rounding = trace.rounding
        split = layout.parallel.tensor * layout.parallel.context > 1
        if layout.rounds(task.settings.get("accumulate", 1)) or (split and trace.own_reasons):
            rounding = replace(rounding, tolerance=rounding.of_sums if tolerance is None else tolerance)
        comparison = LayoutComparison(task, layout, trace, rounding, tell)
        with _named(layout):
            verdicts.append(_run(comparison, world))
    return Report(tuple(verdicts))


@contextmanager
def _named(layout: Layout) -> Iterator[None]:
    """Name the layout in a :class:`ConfigError` of its training, unless it is one process without tiles."""
    try:
        yield
    except ConfigError as error:
        if layout == ONE_PROCESS:
            raise
        raise ConfigError(f"layout {str(layout)!r}: {error}") from error


def _silent(layout: str, step: int) -> None:
    """Do nothing; used in place of a progress function on ranks other than 0, and if there is none."""


def _on_first(world: Communicator | None, function: Callable[[], Any]) -> Any:
    if world is None:
        return function()
    value = None
    with all_ranks(world, "one process"):
        if world.rank == 0:
            value = function()
    return world.broadcast_object(value)


def _run(comparison: LayoutComparison, world: Communicator | None) -> Verdict:
    """Compare one layout on its ranks, and return the verdict on every rank of ``world``."""
    ranks = comparison.layout.ranks
    if world is None:
        return run_in_threads(ranks, comparison.run)[0]
    members = world.split(int(world.rank >= ranks), name=str(comparison.layout))
    with all_ranks(world, str(comparison.layout)):
        verdict = comparison.run(members) if world.rank < ranks else None
    result: Verdict = world.broadcast_object(verdict)
    members.close()
    return result


def record(task: TrainingTask, alone: Layout = ONE_PROCESS, tell: Progress = _silent) -> ReferenceTrace:
    """Train in one process, and return the figures and hashes that layouts with the same tiles are compared with.

    Not collective. ``alone`` is its layout. ``tell("one process", step)`` is called after each step.
    """
    started = time.monotonic()
    with placed(task, "self", alone) as training:
        steps, terms = [], float(max((side for e in training.layout.parameters for side in e.spec.shape), default=1))
        for number in range(task.steps + 1):
            training.train(min(number, 1))
            steps.append(_seen(training))
            terms = max(terms, training.engine.scalars.samples, *(r.weight for r in [training.model.last_step] if r))
            tell("one process", number)
        rounding = Rounding(str(np.dtype(training.engine.dtype)), terms)
        sha256, reasons = training.model.parameters_sha256(), own_reasons(training.model.wrapped_model)
        return ReferenceTrace(rounding, steps, sha256, time.monotonic() - started, bool(reasons))


def _seen(training: ObservedTraining) -> tuple[float | None, float | None, dict[Key, bytes]]:
    report = training.model.last_step
    figures = (None, None) if report is None else (report.loss, report.gradient_norm)
    return (*figures, training.digests())


class LayoutComparison(NamedTuple):
    """Compare one layout with one process: bit by bit, or within the tolerance of ``rounding`` if it has one.

    ``trace`` is the training in one process. ``tell(layout, step)`` is called on rank 0 after each step that agrees.
    """

    task: TrainingTask
    layout: Layout
    trace: ReferenceTrace
    rounding: Rounding
    tell: Progress

    def run(self, comm: Communicator) -> Verdict:
        """Train on the layout and return the verdict. Collective over ``comm``, which has the layout's ranks."""
        started = time.monotonic()
        how = self._exact if self.rounding.tolerance is None else self._rounded
        steps, sha256, largest, finding = how(comm)
        seconds = time.monotonic() - started
        name, ranks = str(self.layout), self.layout.ranks
        asked = self.layout.alone.parallel.parallel_layout().asked_tiles
        tiles = shown_tiles(asked) if max(asked.values()) > 1 else ""
        return Verdict(name, ranks, steps, sha256, seconds, self.rounding.tolerance, largest, finding, tiles)

    def _tell(self, comm: Communicator, step: int) -> None:
        if comm.rank == 0:
            self.tell(str(self.layout), step)

    def _exact(self, comm: Communicator) -> tuple[int, str, float, Finding | None]:
        """Train as users do and compare hashes; at the first difference, train again up to that step to explain it.

        Return the number of steps that agreed, the hash of the last parameters, 0 (the largest difference allowed),
        and the first difference or None.
        """
        wrong = None
        with placed(self.task, comm, self.layout) as training:
            for number in range(self.task.steps + 1):
                training.train(min(number, 1))
                wrong = self._unlike(training, number)
                if wrong is not None:
                    break
                self._tell(comm, number)
            sha256 = training.model.parameters_sha256()
        if wrong is None:
            return self.task.steps, sha256, 0.0, None
        return max(0, wrong.step - 1), sha256, 0.0, self._look(comm, wrong.step) or wrong

    def _unlike(self, training: ObservedTraining, number: int) -> Finding | None:
        """Return the first difference after step ``number``, found on any rank; None if there is none. Collective."""
        loss, norm, digests = self.trace.steps[number]
        seen = _seen(training)
        mine: Finding | None = None
        if repr(seen[0]) != repr(loss):
            mine = Finding(number, "loss", found=seen[0], expected=loss, diagnosis=UNREPEATED)
        elif self.task.settings.get("clip") is not None and repr(seen[1]) != repr(norm):
            mine = Finding(number, "gradient norm", found=seen[1], expected=norm, diagnosis=UNREPEATED)
        elif key := next((key for key, value in digests.items() if seen[2].get(key) != value), None):
            mine = Finding(number, *key, diagnosis=UNREPEATED)
        elif name := training.unlike_copy(training.engine.whole.vector()):
            mine = Finding(number, "copy of a parameter", name, diagnosis=UNREPEATED)
        everyone = training.engine.grid.world.allgather_object(mine, "hashes")
        different = [rank for rank, finding in enumerate(everyone) if finding is not None]
        return replace(everyone[different[0]], ranks=tuple(different)) if different else None

    def _look(self, comm: Communicator, step: int) -> Finding | None:
        """Train again from the start to step ``step``, and compare everything that this step computes. Collective.

        Return the first difference; None if nothing differs this time.
        """
        with self._pair(comm) as pair:
            if not step:
                return pair.start()
            pair.replay(step - 1)
            return pair.step(step)

    def _rounded(self, comm: Communicator) -> tuple[int, str, float, Finding | None]:
        """Compare all that every step computes, within the tolerance, with one process.

        Before each step, that process takes over the layout's parameters and optimizer arrays. Return the number of
        steps that agreed, the hash of the last parameters, the largest difference, and the first difference that is
        too large or None.
        """
        finding, done = None, 0
        with self._pair(comm) as pair:
            for number in range(self.task.steps + 1):
                finding = pair.step(number) if number else pair.start()
                if finding is not None:
                    break
                done = number
                self._tell(comm, number)
            return done, pair.training.model.parameters_sha256(), pair.largest, finding

    @contextmanager
    def _pair(self, comm: Communicator) -> Iterator[TrainingPair]:
        alone = placed(self.task, "self", self.layout.alone) if comm.rank == 0 else nullcontext()
        with placed(self.task, comm, self.layout) as training, alone as reference:
            yield TrainingPair(comm, self.layout, training, reference, self.rounding)
