"""Look into single training steps: save and replay steps with non-finite values, and measure the phases of a step.

:func:`dump_bad_step` saves the samples of a step whose loss or gradient was not finite, :func:`read_bad_step` reads
them, and :func:`replay_bad_step` evaluates them again in one process, with statistics of every array.

:func:`traced` records when a rank begins and ends each phase of a step, and each message. :func:`phases_of` computes
from the spans of all ranks the seconds of each phase, on one clock (:func:`clock_offset`); waiting for other ranks is a
phase of its own.

[Note: the files of a bad step] A folder has the file ``step.json`` and one file for each bad grain. ``step.json`` is
one JSON object with the keys ``format`` ("mpizero bad step"), ``version`` (1), ``step`` (number of the training step,
from 1), ``run_step`` and ``seed`` (keys of the dropout's random numbers), ``loss_scale``, ``micro_batch`` and
``global_batch`` (numbers of samples), ``epoch`` (left out if 0), ``found`` (the values that were not finite: a list of
objects with ``step``, ``rank``, ``tensor``, ``start``, ``stop``, ``message``), ``grains`` (names of the other files),
``structure`` (only for batches that are trees of arrays: the :func:`~mpizero._util.pytree.outline` of ``x`` and ``y``),
``libraries`` (versions by name) and ``about`` (values from the caller; `mpizero train` writes its configuration). The
file of grain 3, ``grain_00003.npz``, is uncompressed and without pickle. A grain's file has the arrays ``x`` and ``y``
(for trees ``x.0``, ``x.1``, ...), ``samples`` (positions in the global batch) and, if the caller knows them,
``indices`` (positions in the data set).

[Note: waiting] A rank in a collective waits until the last rank has entered it. The time after that is the collective
itself, and counts for the phase that made the call. A non-blocking collective is entered when it is started; of the
time that it is in flight, only the time that a rank blocks in it counts. All the time that a rank blocks in a receive
from one other rank counts as waiting, because the receive was posted ahead. Shared windows synchronize by barriers of a
communicator, so waiting for them is recorded, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import SampleTree, leaves_of, of_outline, outline, paths_of
from mpizero.checkpoint.format import is_count, is_number, parse, read_regular
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, record_call
from mpizero.comm.communicator import MESSAGE, CommunicatorCall, Timeline, TimeSpan
from mpizero.comm.startup import versions
from mpizero.errors import CheckpointError, ConfigError, DataError
from mpizero.layout.fields import Cut
from mpizero.layout.flat import Unit, flat_names
from mpizero.sharding.engine import Engine
from mpizero.sharding.forward_backward import BlackBoxEvaluator, BlockEvaluator, Evaluator
from mpizero.sharding.grad_reduce import GradientViews
from mpizero.sharding.model import Model
from mpizero.sharding.step_report import NonFinite, StepReport
from mpizero.types import EVALUATE, Array, Loss, Params, Run, as_reals

FORMAT, VERSION = "mpizero bad step", 1
#: The largest ``step.json``, in bytes, that is read.
_LIMIT = 16 << 20
#: The structure of batches whose x and y are arrays; it is left out of ``step.json``.
_ARRAYS = {"x": "*", "y": "*"}
_GRAIN = re.compile(r"grain_[0-9]{5,18}\.npz")


@dataclass(frozen=True)
class BadGrain:
    """Hold the samples of one grain, with their positions.

    ``x`` and ``y`` are inputs and targets: arrays, or trees of arrays. ``samples`` are their positions in the global
    batch, ``indices`` their positions in the data set (None if unknown).
    """

    x: Any
    y: Any
    samples: Array
    indices: Array | None = None


@dataclass(frozen=True)
class BadStep:
    """Hold a bad step that :func:`dump_bad_step` wrote, with the samples of its bad grains.

    Attributes
    ----------
    step : int
        Number of the training step, from 1; skipped steps are counted.
    run_step, seed : int
        Keys of the dropout's random numbers in that step.
    loss_scale : float
        Loss scale of that step.
    micro_batch, global_batch : int
        Number of samples in a full micro-batch, and in the global batch.
    found : tuple of dict
        Descriptions of the values that were not finite, with the fields of
        :class:`~mpizero.sharding.step_report.NonFinite`.
    libraries : dict of str to str
        Versions of Python and libraries, by name.
    about : dict
        The JSON values that were passed to :func:`dump_bad_step` as ``about``.
    grains : tuple of BadGrain
        The grains in which the values were found, with all their samples.
    epoch : int
        The epoch that was passed to ``train``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.Config(micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.sharding.dump_bad_step(model, (x, y), "bad_steps")
    >>> step = mz.sharding.read_bad_step(folder)
    >>> step.step, step.global_batch, step.found[0]["tensor"], step.grains[0].x.tolist()
    (1, 2, 'loss', [[inf]])
    """

    step: int
    run_step: int
    seed: int
    loss_scale: float
    micro_batch: int
    global_batch: int
    found: tuple[dict[str, Any], ...]
    libraries: dict[str, str]
    about: dict[str, Any]
    grains: tuple[BadGrain, ...]
    epoch: int = 0


def dump_bad_step(
    model: Model,
    batch: tuple[Any, Any],
    folder: str | os.PathLike[str],
    *,
    indices: Any = None,
    about: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write those grains of the model's last step whose loss or gradient was not finite to a folder below ``folder``.

    Collective over the model's ranks; rank 0 writes.

    Parameters
    ----------
    model : sharded model
        The model, whose ``last_step`` was skipped.
    batch : (array, array), or trees of arrays
        The inputs and targets that this rank passed to ``train`` in that step.
    folder : path
        Folder in which the folder ``step_<number>`` is created. If ``step_<number>`` exists already, nothing is
        written.
    indices : 1-D array of int or None
        Positions of this rank's samples in the data set, which are saved with the samples; None saves no positions.
    about : mapping or None
        JSON values to add to ``step.json``, by key.

    Returns
    -------
    Path or None
        The folder of the step; None if the last step was not skipped.

    Raises
    ------
    DataError
        On every rank, if the batch contains anything but arrays of numbers.
    OSError
        On rank 0, if the files cannot be written. The other ranks raise RemoteError.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> batch = np.array([[np.inf]], np.float32), np.array([0])
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.AdamW()) as model:
    ...     _ = model.train(*batch)
    ...     sorted(path.name for path in mz.sharding.dump_bad_step(model, batch, "kept").iterdir())
    ['grain_00000.npz', 'step.json']
    """
    report, comm = model.last_step, model.mesh.communicator
    if report is None or not report.non_finite:
        return None
    record_call(comm, "dump_bad_step")
    with all_ranks(comm, first=True):
        tree, structure = _checked(*batch)
    grains, total = _gather(model, tree, indices, report.non_finite)
    path = Path(folder) / f"step_{report.non_finite[0].step:08d}"
    with all_ranks(comm):
        if comm.rank == 0 and not path.exists():
            batch_tree = {} if structure == _ARRAYS else {"structure": structure}
            _write(path, _described(model, report, total) | batch_tree | {"about": dict(about or {})}, grains)
    return path


def _checked(x: Any, y: Any) -> tuple[SampleTree, dict[str, Any]]:
    """Return a batch as a tree, and its structure for ``step.json``; raise DataError if any array is not of numbers."""
    tree = SampleTree.of(x=x, y=y)
    from mpizero.checkpoint.npz import NUMBERS

    odd = [f"{path} is {leaf.dtype}" for path, leaf in tree.named if leaf.dtype.kind not in NUMBERS]
    if why := tree.uncut or ", ".join(odd):
        raise DataError(f"{why}: only arrays of numbers can be kept for a replay")
    return tree, {"x": outline(x, "x"), "y": outline(y, "y")}


def _gather(
    model: Model, tree: SampleTree, indices: Any, faults: tuple[NonFinite, ...]
) -> tuple[dict[int, BadGrain], int]:
    """Gather, from all ranks, the samples of the grains with the non-finite values ``faults``. Collective.

    ``tree`` has this rank's samples and ``indices`` their positions in the data set. Return the grains by number, and
    the number of samples in the global batch.
    """
    group = model._engine.grid.batch
    counts = np.empty(group.size, np.int64)
    group.allgather(np.array([local_count := tree.count()], np.int64), counts, "bad step")
    total, first = int(counts.sum()), int(counts[: group.rank].sum())
    size = model.grain_size(total)
    numbers = sorted({n for bad in faults for n in range(bad.start // size, -(-bad.stop // size))})[: len(faults) + 16]
    arrays, known = [*tree.leaves, np.arange(first, first + local_count)], len(tree.leaves)
    if indices is not None:
        arrays.append(np.asarray(indices, np.int64))
    grains = {}
    for number in numbers:
        start, stop = (min(max(index - first, 0), local_count) for index in (number * size, (number + 1) * size))
        parts = group.allgather_object([array[start:stop] for array in arrays], "bad step")
        joined = [np.concatenate(blocks) for blocks in zip(*parts, strict=True)]
        if (cut := model._engine.partitioned.cut) is not None:
            parts = model._engine.grid.context.allgather_object(joined[:known], "bad step")
            joined[:known] = [_whole(cut, leaves) for leaves in zip(*parts, strict=True)]
        grains[number] = BadGrain(*tree.build(iter(joined[:known])), *joined[known:])
    return grains, total


def _whole(cut: Cut, parts: Sequence[Array]) -> Array:
    """Return the whole field of which the ranks of a domain have ``parts``; of an array that is no field, rank 0's."""
    axes, places = len(cut.parts), [cut.coordinates(rank) for rank in range(cut.size)]
    if parts[0].ndim <= axes:
        return parts[0]
    edges = [[rank for rank, at in enumerate(places) if not any(at[:axis] + at[axis + 1 :])] for axis in range(axes)]
    extents = tuple(sum(parts[rank].shape[1 + axis] for rank in ranks) for axis, ranks in enumerate(edges))
    whole = np.empty((len(parts[0]), *extents, *parts[0].shape[1 + axes :]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[(slice(None), *cut.box(extents, rank))] = part
    return whole


def _described(model: Model, report: StepReport, total: int) -> dict[str, Any]:
    engine, non_finite = model._engine, report.non_finite
    epoch = engine.step_arguments.epoch
    return ({"epoch": epoch} if epoch else {}) | {
        "format": FORMAT,
        "version": VERSION,
        "step": non_finite[0].step,
        "run_step": non_finite[0].step - 1,
        "seed": int(getattr(model.wrapped_model, "seed", 0)),
        "loss_scale": report.loss_scale,
        "micro_batch": engine.grain_rule.micro_size(total),
        "global_batch": total,
        "found": [asdict(bad) for bad in non_finite],
        "libraries": versions(),
    }


def _write(path: Path, described: Mapping[str, Any], grains: Mapping[int, BadGrain]) -> None:
    """Write ``step.json`` and the files of the grains to a temporary folder, and rename it to ``path`` at the end.

    ``described`` are the values of ``step.json`` except for "grains".
    """
    temporary = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        names = [f"grain_{number:05d}.npz" for number in grains]
        for name, grain in zip(names, grains.values(), strict=True):
            arrays = _entries(grain.x, "x") | _entries(grain.y, "y") | {"samples": grain.samples}
            np.savez(temporary / name, **arrays if grain.indices is None else {**arrays, "indices": grain.indices})
        text = json.dumps({**described, "grains": names}, indent=1, allow_nan=False)
        (temporary / "step.json").write_text(text + "\n", encoding="utf-8")
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_bad_step(path: str | os.PathLike[str]) -> BadStep:
    """Read a bad step that :func:`dump_bad_step` wrote to folder ``path``. Not collective.

    Raises
    ------
    DataError
        If ``path`` is not the folder of a bad step, or its files are damaged or of another version. The message names
        the file.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.Config(micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.sharding.dump_bad_step(model, (x, y), "bad_steps")
    >>> mz.sharding.read_bad_step(folder).grains[0].samples
    array([1])
    """
    folder = Path(path)
    file = folder / "step.json"
    try:
        document = parse(read_regular(file, _LIMIT))
    except OSError as error:
        raise DataError(
            f"{folder}: no bad step: {file.name}: {error.strerror}; expected a folder as run/bad_steps/step_00000123"
        ) from None
    except CheckpointError as error:
        raise DataError(f"{error}: no bad step") from None
    except ValueError as error:
        raise DataError(f"{file}: damaged, or no bad step: {error}") from None
    version = document.get("version") if isinstance(document, dict) and document.get("format") == FORMAT else None
    if type(version) is not int or version != VERSION:
        raise DataError(f"{file}: not a bad step of version {VERSION}")
    del document["format"], document["version"]
    document = {"epoch": 0, "structure": _ARRAYS} | document
    if missing := sorted(_FIELDS.keys() - document.keys()):
        raise DataError(f"{file}: {missing[0]!r} is missing")
    if unknown := sorted(document.keys() - _FIELDS.keys()):
        raise DataError(f"{file}: {unknown[0]!r:.80} is unknown; expected {', '.join(_FIELDS)}")
    for key, (is_valid, expected) in _FIELDS.items():
        if not is_valid(document[key]):
            raise DataError(f"{file}: {key} is {document[key]!r:.200}: expected {expected}")
    names, non_finite, structure = document.pop("grains"), tuple(document.pop("found")), document.pop("structure")
    return BadStep(**document, found=non_finite, grains=tuple(_read_grain(folder / name, structure) for name in names))


def _is_non_finite(value: object) -> bool:
    """Tell whether a JSON value is an object with the fields of :class:`~mpizero.sharding.step_report.NonFinite`."""
    return (
        isinstance(value, dict)
        and value.keys() == {field.name for field in fields(NonFinite)}
        and all(isinstance(value[key], str) for key in ("tensor", "message"))
        and all(is_count(value[key]) for key in ("step", "rank", "start", "stop"))
    )


def _are_names(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(name, str) and _GRAIN.fullmatch(name) for name in value)
        and len(set(value)) == len(value)
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_COUNT: tuple[Callable[[object], bool], str] = (is_count, "a whole number >= 0")
#: Keys of ``step.json`` besides format and version, each with a check of its value, and the text for errors.
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "step": _COUNT,
    "run_step": _COUNT,
    "seed": (lambda value: type(value) is int and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "loss_scale": (is_number, "a finite number > 0"),
    "micro_batch": (lambda value: is_count(value, 1), "a whole number > 0"),
    "global_batch": _COUNT,
    "found": (
        lambda value: isinstance(value, list) and all(map(_is_non_finite, value)),
        "a list of step, rank, tensor, start, stop and message",
    ),
    "libraries": (_are_texts, "texts by name"),
    "epoch": _COUNT,
    "structure": (lambda value: isinstance(value, dict) and set(value) == {"x", "y"}, "an object of x and y"),
    "about": (lambda value: isinstance(value, dict), "an object"),
    "grains": (_are_names, "names of files beside it, as grain_00003.npz, each once"),
}


def _entries(value: Any, name: str) -> dict[str, Any]:
    """Return the arrays of ``value`` by their names in a grain's file; ``name`` is "x" or "y"."""
    if isinstance(value, np.ndarray):
        return {name: value}
    return {f"{name}.{number}": leaf for number, leaf in enumerate(leaves_of(value))}


def _read_grain(file: Path, structure: Mapping[str, Any]) -> BadGrain:
    from mpizero.checkpoint.npz import read_arrays

    try:
        arrays = read_arrays(file)
        samples = arrays["samples"]
        names = {name: [name] if kind == "*" else _numbered(arrays, name) for name, kind in structure.items()}
        x, y = (_built(structure[name], [arrays[path] for path in names[name]]) for name in "xy")
    except (OSError, CheckpointError, KeyError, ValueError) as error:
        raise DataError(f"{file}: not the samples of a grain: {error}") from None
    shapes = {path: arrays[path].shape for paths in names.values() for path in paths}
    if samples.ndim != 1 or not len(samples) or any(shape[:1] != samples.shape for shape in shapes.values()):
        lengths = [*(f"{path} {shape}" for path, shape in shapes.items()), f"samples {samples.shape}"]
        raise DataError(f"{file}: arrays differ in their number of samples: {', '.join(lengths)}")
    if samples.dtype.kind not in "iu" or not 0 <= int(samples.min()) <= int(samples.max()) < 2**63:
        raise DataError(f"{file}: samples are {samples.dtype}: expected places in the global batch, whole numbers >= 0")
    return BadGrain(x, y, samples, arrays.get("indices"))


def _built(structure: Any, leaves: list[Array]) -> Any:
    rest = iter(leaves)
    value = of_outline(structure, rest)
    if next(rest, None) is not None:
        raise ValueError("the file has more arrays than the structure")
    return value


def _numbered(arrays: Mapping[str, Array], name: str) -> list[str]:
    count = sum(path.startswith(f"{name}.") for path in arrays)
    return [f"{name}.{number}" for number in range(count)]


@dataclass(frozen=True)
class ReplayedArray:
    """Hold statistics of one array of a replay.

    Attributes
    ----------
    what : str
        Kind of the array: "parameter", "input", "output" (of a block), "loss", "gradient of output" (of a block) or
        "gradient" (of a parameter).
    name : str
        Name of the block or parameter; the path in ``x`` of an input; "loss" for the loss.
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
        flat = as_reals(np.asarray(values))
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
    >>> config = mz.Config(micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.sharding.dump_bad_step(model, (x, y), "bad_steps")
    ...     replay = mz.sharding.replay_bad_step(folder, model)[0]
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
        return next((statistics for statistics in self.figures if statistics.not_finite), None)


def replay_bad_step(step: BadStep | str | os.PathLike[str], model: Model) -> list[Replay]:
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
    >>> config = mz.Config(micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.sharding.dump_bad_step(model, (x, y), "bad_steps")
    ...     first = mz.sharding.replay_bad_step(folder, model)[0].first  # the first array that is not finite
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
            result.append(Replay(run.first_sample, int(samples[-1]) + 1, loss, weight, tuple(trace.statistics)))
    return result


class _Trace:
    """Run one micro-batch forward and backward, and record the statistics of every array."""

    by_block = accumulates_blocks = False

    def __init__(self, model: Model, loss_scale: float) -> None:
        self.model, self.engine, self.loss_scale = model, model._engine, loss_scale
        self.statistics: list[ReplayedArray] = []
        self._views = GradientViews(self.engine.layout, self.engine.memory, self.engine.dtype, self.engine.integers)
        self._targets: dict[int, Any] = {}
        self._frozen = {entry.spec.name for entry in self.engine.layout.entries if entry.gradient < 0}

    def note(self, what: str, name: str, values: Any) -> None:
        """Record the statistics of ``values``, an array or every array of a tree; do nothing if it is None."""
        for path, leaf in paths_of(**{name: values}):
            self.statistics.append(ReplayedArray.of(what, path, leaf))

    def follow(self, x: Any, y: Any, run: Run) -> tuple[float, float]:
        """Run one micro-batch forward and backward; return its loss sum and weight."""
        for entry in self.engine.layout.parameters:
            self.note("parameter", entry.spec.name, self.engine.store.values[entry.span.start : entry.span.stop])
        for path, leaf in SampleTree.of(x=x).named:
            self.note("input", path, leaf)
        at = len(self.statistics)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            loss, weight = self._evaluator().gradients(x, y, run, self)
        if not self.engine.block_model:  # a function's loss comes before its gradients
            self.statistics.insert(at, ReplayedArray.of("loss", "loss", loss))
        return loss, weight

    def note_gradients(self, block: str, views: Any) -> None:
        """Record the statistics of the gradients of a block's trainable parameters."""
        for name, view in flat_names(views, block):
            if name not in self._frozen:
                self.note("gradient", name, view)

    def _evaluator(self) -> Evaluator:
        engine = self.engine
        if not engine.block_model:
            return BlackBoxEvaluator(engine.model, engine.store)
        evaluator = BlockEvaluator(engine.model, engine.store, lambda: self.loss_scale)
        before = None
        for name, block in engine.model.blocks.items():
            evaluator.blocks[name] = _RecordedLayer(block, name, before, self)
            before = name
        evaluator.criterion = _RecordedLoss(evaluator.criterion, before or "x", self)
        return evaluator

    def views(self, unit: Unit) -> Any:
        """Return views of new arrays, which layers write a unit's gradients to."""
        self._targets[unit.index] = self._views.unit(unit, np.zeros(unit.gradients, self.engine.dtype))
        return self._targets[unit.index]

    def accumulate(self, unit: Unit, block: str, dx: Any) -> Any:
        """Return ``dx``, and add no gradients: :class:`_RecordedLayer` has already recorded those of the block."""
        return dx

    def reduce(self, unit: Unit) -> None:
        """Record the gradients of a unit of a functional model; do nothing for a model of blocks."""
        views = self._targets.pop(unit.index, None)  # None if a layer has raised before this unit
        if views is not None and not self.engine.block_model:  # else recorded by _RecordedLayer
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

        The returned gradient, None if the input has no gradient, is recorded as that of the previous block's output.
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


@contextmanager
def traced(engine: Engine) -> Iterator[Timeline]:
    """Yield the engine's timeline, which records the phases and messages of this rank inside the ``with`` block.

    Not collective. Calls of communicators that have only one rank are not recorded, because they take no time.
    """
    timeline, grid = engine.timeline, engine.grid
    several = [c for c in (grid.world, *grid.communicators) if c.size > 1]
    timeline.on = True
    for communicator in several:
        communicator.timeline = timeline
    try:
        yield timeline
    finally:
        timeline.on = False
        for communicator in several:
            communicator.timeline = None


#: The phases of a step that `bench step` measures. "local sums" are checks and sums of gradients inside a rank.
#: "agreement" redistributes samples and agrees on losses and norms. "waiting" is waiting for other ranks in any phase.
PHASES = (
    "forward",
    "backward",
    "layers' messages",
    "local sums",
    "reduction",
    "optimizer",
    "publication",
    "agreement",
    "waiting",
)
#: Time in no traced phase: Python between phases, checks of memory, schedules.
OTHER = "other"
ALL_PHASES = (*PHASES, OTHER)
_LAYERS, _WAITING = "layers' messages", "waiting"
#: Round trips of a message between two hosts; the shortest tells the difference of their clocks best.
_ROUND_TRIPS = 20

#: What identifies a collective on all its ranks: name and first world rank of the communicator, number of the call.
Call = tuple[str, int, int]


class PhaseSpan(NamedTuple):
    """Hold one traced span of time, in the form in which ranks exchange it.

    Attributes
    ----------
    phase, name : str
        The phase, and the names of the blocks that were computed or the description of a communicator's call.
    start, stop : float
        When the span began and ended, in seconds of rank 0's clock.
    call : tuple or None
        Identifies a collective on all its ranks: the communicator's name, the world rank of its first rank, and the
        number of the call; None for other spans.
    waits : bool
        Whether the span is a receive from one other rank.
    """

    phase: str
    name: str
    start: float
    stop: float
    call: Call | None = None
    waits: bool = False


class StepSpans(NamedTuple):
    """Hold one step of one rank: start and end in seconds of rank 0's clock, and the spans inside the step.

    Spans are sorted: one that contains another comes first.
    """

    start: float
    stop: float
    spans: tuple[PhaseSpan, ...]


def clock_offset(comm: Communicator) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's. Collective over ``comm``.

    The offset is 0 on the host of rank 0. The first rank of each other host measures it for all ranks of that host.
    """
    hosts = comm.allgather_object(_host(), "clocks")
    if len(set(hosts)) == 1:
        return 0.0
    offset = 0.0
    for rank in sorted({hosts.index(host) for host in hosts} - {0}):
        if comm.rank in (0, rank):
            offset = _compared(comm, rank)
    offsets: list[float] = comm.allgather_object(offset, "clocks")
    return offsets[hosts.index(hosts[comm.rank])]


def _host() -> str:
    """Return the boot id of the system, which is the same on ranks that share a clock; "" if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""


def _compared(comm: Communicator, rank: int) -> float:
    """Return, on ``rank``, the seconds to add to the clock of ``rank`` to get rank 0's time; return 0 on rank 0.

    Both of these ranks call it. ``rank`` asks rank 0 for the time repeatedly, and uses the fastest round trip.
    """
    box, trips = np.zeros(1), []
    for _ in range(_ROUND_TRIPS):
        if comm.rank == 0:
            comm.recv(box, rank)
            box[0] = time.monotonic()
            comm.send(box, rank)
        else:
            sent_at = time.monotonic()
            comm.send(box, 0)
            comm.recv(box, 0)
            received_at = time.monotonic()
            trips.append((received_at - sent_at, float(box[0]) - (sent_at + received_at) / 2))
    return min(trips)[1] if trips else 0.0


def leaders(communicators: Iterable[Communicator], world: Communicator) -> dict[str, int]:
    """Return the world rank of each communicator's rank 0, by the communicator's name.

    Collective over each of ``communicators``, in their order.
    """
    return {c.name: c.broadcast_object(world.rank, tag="bench") for c in communicators}


def spans_of(spans: Sequence[TimeSpan], offset: float, first: Mapping[str, int]) -> tuple[PhaseSpan, ...]:
    """Return the traced spans of a rank as :class:`PhaseSpan`, sorted by start, outer spans first. Not collective.

    ``offset`` is added to all times, and ``first`` is the result of :func:`leaders`. A communicator's call inside
    another call is left out.
    """
    phases: list[PhaseSpan] = []
    inside = float("-inf")  # when the last communicator call that is kept ends
    for phase, detail, start, stop in sorted(spans, key=lambda span: (span.start, -span.stop)):
        times = (start + offset, stop + offset)
        if not isinstance(detail, CommunicatorCall):
            phases.append(PhaseSpan(phase, _name(detail), *times))
        elif stop > inside:
            inside = stop
            single = detail.operation in ("isend", "irecv")
            call = None if single else (detail.communicator, first[detail.communicator], detail.sequence)
            phases.append(PhaseSpan(phase, str(detail), *times, call, detail.operation == "irecv"))
    return tuple(phases)


def _name(detail: Any) -> str:
    return ", ".join(detail.blocks) if hasattr(detail, "blocks") else str(detail)


def waits(ranks: Sequence[Sequence[StepSpans]]) -> dict[Call, float]:
    """Return, for every collective, the time at which the last rank entered it. Not collective.

    Times are in seconds of rank 0's clock. ``ranks`` has the traced steps of every rank.
    """
    latest: dict[Call, float] = {}
    for steps in ranks:
        for call, start in entered(*steps).items():
            latest[call] = max(start, latest.get(call, start))
    return latest


def entered(*steps: StepSpans) -> dict[Call, float]:
    """Return, for every collective in ``steps`` of one rank, the time at which the rank entered it. Not collective."""
    times: dict[Call, float] = {}
    for span in (span for step in steps for span in step.spans):
        if span.call is not None:
            times.setdefault(span.call, span.start)  # later spans are waits for the same collective
    return times


def waited(span: PhaseSpan, latest: Mapping[Call, float]) -> float:
    """Return the seconds of ``span`` in which its rank waited for other ranks. Not collective.

    ``latest`` is the result of :func:`waits`.
    """
    if span.waits:
        return span.stop - span.start
    if span.call is None:
        return 0.0
    return max(0.0, min(span.stop, latest[span.call]) - span.start)


def phases_of(step: StepSpans, latest: Mapping[Call, float]) -> dict[str, float]:
    """Return the seconds of one step by phase; their sum is the duration of the step. Not collective.

    ``latest`` is the result of :func:`waits`.
    """
    seconds = dict.fromkeys(ALL_PHASES, 0.0)
    for span, around, exclusive in _exclusive_times(step):
        if span.phase == MESSAGE:
            waiting = min(exclusive, waited(span, latest))
            seconds[_WAITING] += waiting
            inside = around in seconds and around not in ("forward", "backward", OTHER)
            seconds[around if inside else _LAYERS] += exclusive - waiting
        else:
            seconds[span.phase if span.phase in seconds else OTHER] += exclusive
    return seconds


def _exclusive_times(step: StepSpans) -> Iterator[tuple[PhaseSpan, str, float]]:
    """Yield each span, the phase of the innermost span around it, and its exclusive time in seconds.

    The first span is the whole step. The exclusive time of a span is its duration minus those of the spans inside it.
    """
    root = PhaseSpan(OTHER, "step", step.start, step.stop)
    spans = (root, *step.spans)
    exclusive, parents, stack = [span.stop - span.start for span in spans], [0] * len(spans), [0]
    for index, span in enumerate(step.spans, start=1):
        while len(stack) > 1 and spans[stack[-1]].stop <= span.start:
            stack.pop()
        parents[index] = stack[-1]
        exclusive[stack[-1]] -= span.stop - span.start
        stack.append(index)
    for index, span in enumerate(spans):
        yield span, spans[parents[index]].phase, exclusive[index]
