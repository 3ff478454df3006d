"""Save the samples of a step whose loss or gradient was not finite to files, for a replay in one process.

[Note: the files of a bad step] A folder has the file ``step.json`` and one file for each bad grain. ``step.json``
is one JSON object with the keys ``format`` ("mpizero bad step"), ``version`` (1), ``step`` (number of the training
step, from 1), ``run_step`` and ``seed`` (keys of the dropout's random numbers), ``loss_scale``, ``micro_batch`` and
``global_batch`` (numbers of samples), ``epoch`` (left out if 0), ``found`` (the values that were not finite: a list of
objects with ``step``, ``rank``, ``tensor``, ``start``, ``stop``, ``message``), ``grains`` (names of the other files),
``structure`` (only for batches that are trees of arrays: the :func:`~mpizero._util.pytree.outline` of ``x`` and ``y``),
``libraries`` (versions by name) and ``about`` (values from the caller; `mpizero train` writes its configuration). The
file of grain 3, ``grain_00003.npz``, is uncompressed and without pickle. It has the arrays ``x`` and ``y`` (for trees
``x.0``, ``x.1``, ...), ``samples`` (positions in the global batch) and, if the caller knows them, ``indices``
(positions in the data set).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mpizero._util.pytree import SampleTree, leaves_of, of_outline, outline
from mpizero.checkpoint.format import is_count, is_number, parse, read_regular
from mpizero.checkpoint.npz import NUMBERS, read_arrays
from mpizero.comm.agreement import all_ranks, record_call
from mpizero.comm.startup import versions
from mpizero.errors import CheckpointError, DataError
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.step_report import NonFinite, StepReport
from mpizero.types import Array

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
        Number of the training step, from 1; skipped steps count.
    run_step, seed : int
        Keys of the dropout's random numbers in that step.
    loss_scale : float
        Loss scale of that step.
    micro_batch, global_batch : int
        Number of samples in a full micro-batch, and in the global batch.
    found : tuple of dict
        The values that were not finite; each has the fields of :class:`~mpizero.parallel.step_report.NonFinite`.
    libraries : dict of str to str
        Versions of Python and libraries, by name.
    about : dict
        JSON values from the caller of :func:`dump_bad_step`.
    grains : tuple of BadGrain
        The grains in which the values were found, with all their samples.
    epoch : int
        The epoch that was passed to ``train``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.ShardingConfig(comm="self", micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.dump_bad_step(model, (x, y), "bad_steps")
    >>> step = mz.parallel.read_bad_step(folder)
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
    model: ShardedModelBase,
    batch: tuple[Any, Any],
    folder: str | os.PathLike[str],
    *,
    indices: Any = None,
    about: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write the grains of the last step in which a loss or gradient was not finite to a folder below ``folder``.

    Collective over the model's ranks; rank 0 writes.

    Parameters
    ----------
    model : sharded model
        The model, whose ``last_step`` was skipped.
    batch : (array, array), or trees of arrays
        The inputs and targets that this rank passed to ``train`` in that step.
    folder : path
        Folder in which the folder ``step_<number>`` is created. If that exists already, nothing is written.
    indices : 1-D array of int or None
        Positions of this rank's samples in the data set, to be saved, too.
    about : mapping or None
        More JSON values to write into ``step.json``.

    Returns
    -------
    Path or None
        The folder of the step; None if the last step was not skipped.

    Raises
    ------
    DataError
        On every rank, if the batch contains something else than arrays of numbers.
    OSError
        On rank 0, if the files cannot be written. The other ranks raise RemoteError.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> batch = np.array([[np.inf]], np.float32), np.array([0])
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.AdamW(), comm="self") as model:
    ...     _ = model.train(*batch)
    ...     sorted(path.name for path in mz.dump_bad_step(model, batch, "bad_steps").iterdir())
    ['grain_00000.npz', 'step.json']
    """
    report, comm = model.last_step, model.config.communicator
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
    """Return the tree of a batch, and its structure for ``step.json``; raise DataError if it is not all numbers."""
    tree = SampleTree.of(x=x, y=y)
    odd = [f"{path} is {leaf.dtype}" for path, leaf in tree.named if leaf.dtype.kind not in NUMBERS]
    if why := tree.uncut or ", ".join(odd):
        raise DataError(f"{why}: only arrays of numbers can be kept for a replay")
    return tree, {"x": outline(x, "x"), "y": outline(y, "y")}


def _gather(
    model: ShardedModelBase, tree: SampleTree, indices: Any, found: tuple[NonFinite, ...]
) -> tuple[dict[int, BadGrain], int]:
    """Gather the samples of the grains in ``found`` from all ranks. Collective.

    ``tree`` has this rank's samples and ``indices`` their positions in the data set. Return the grains by number, and
    the number of samples in the global batch.
    """
    group = model.engine.grid.batch
    counts = np.empty(group.size, np.int64)
    group.allgather(np.array([own := tree.count()], np.int64), counts, "bad step")
    total, first = int(counts.sum()), int(counts[: group.rank].sum())
    size = model.grain_size(total)
    numbers = sorted({n for bad in found for n in range(bad.start // size, -(-bad.stop // size))})[: len(found) + 16]
    arrays, known = [*tree.leaves, np.arange(first, first + own)], len(tree.leaves)
    if indices is not None:
        arrays.append(np.asarray(indices, np.int64))
    grains = {}
    for number in numbers:
        start, stop = (min(max(place - first, 0), own) for place in (number * size, (number + 1) * size))
        parts = group.allgather_object([array[start:stop] for array in arrays], "bad step")
        whole = [np.concatenate(held) for held in zip(*parts, strict=True)]
        grains[number] = BadGrain(*tree.build(iter(whole[:known])), *whole[known:])
    return grains, total


def _described(model: ShardedModelBase, report: StepReport, total: int) -> dict[str, Any]:
    engine, found = model.engine, report.non_finite
    epoch = engine.asked.epoch
    return ({"epoch": epoch} if epoch else {}) | {
        "format": FORMAT,
        "version": VERSION,
        "step": found[0].step,
        "run_step": found[0].step - 1,
        "seed": int(getattr(model.wrapped_model, "seed", 0)),
        "loss_scale": report.loss_scale,
        "micro_batch": engine.grain_rule.micro_size(total),
        "global_batch": total,
        "found": [asdict(bad) for bad in found],
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
            held = _entries(grain.x, "x") | _entries(grain.y, "y") | {"samples": grain.samples}
            np.savez(temporary / name, **held if grain.indices is None else {**held, "indices": grain.indices})
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
        If ``path`` is no folder of a bad step, or its files are damaged or of another version. The message names the
        file.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0], [np.inf]], np.float32), np.array([0, 1])
    >>> config = mz.ShardingConfig(comm="self", micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     _ = model.train(x, y)
    ...     folder = mz.dump_bad_step(model, (x, y), "bad_steps")
    >>> mz.parallel.read_bad_step(folder).grains[0].samples
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
    for key, (sound, expected) in _FIELDS.items():
        if not sound(document[key]):
            raise DataError(f"{file}: {key} is {document[key]!r:.200}: expected {expected}")
    names, found, structure = document.pop("grains"), tuple(document.pop("found")), document.pop("structure")
    return BadStep(**document, found=found, grains=tuple(_read_grain(folder / name, structure) for name in names))


def _is_found(value: object) -> bool:
    """Tell whether a JSON value is an object with the fields of :class:`~mpizero.parallel.step_report.NonFinite`."""
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


_WHOLE: tuple[Callable[[object], bool], str] = (is_count, "a whole number >= 0")
#: Keys of ``step.json`` besides format and version, each with a check of its value, and the text for errors.
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "step": _WHOLE,
    "run_step": _WHOLE,
    "seed": (lambda value: type(value) is int and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "loss_scale": (is_number, "a finite number > 0"),
    "micro_batch": (lambda value: is_count(value, 1), "a whole number > 0"),
    "global_batch": _WHOLE,
    "found": (
        lambda value: isinstance(value, list) and all(map(_is_found, value)),
        "a list of step, rank, tensor, start, stop and message",
    ),
    "libraries": (_are_texts, "texts by name"),
    "epoch": _WHOLE,
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
    try:
        held = read_arrays(file)
        samples = held["samples"]
        names = {name: [name] if kind == "*" else _numbered(held, name) for name, kind in structure.items()}
        x, y = (_built(structure[name], [held[path] for path in names[name]]) for name in "xy")
    except (OSError, CheckpointError, KeyError, ValueError) as error:
        raise DataError(f"{file}: not the samples of a grain: {error}") from None
    shapes = {path: held[path].shape for paths in names.values() for path in paths}
    if samples.ndim != 1 or not len(samples) or any(shape[:1] != samples.shape for shape in shapes.values()):
        lengths = [*(f"{path} {shape}" for path, shape in shapes.items()), f"samples {samples.shape}"]
        raise DataError(f"{file}: arrays differ in their number of samples: {', '.join(lengths)}")
    if samples.dtype.kind not in "iu" or not 0 <= int(samples.min()) <= int(samples.max()) < 2**63:
        raise DataError(f"{file}: samples are {samples.dtype}: expected places in the global batch, whole numbers >= 0")
    return BadGrain(x, y, samples, held.get("indices"))


def _built(structure: Any, leaves: list[Array]) -> Any:
    rest = iter(leaves)
    value = of_outline(structure, rest)
    if next(rest, None) is not None:
        raise ValueError("the file has more arrays than the structure")
    return value


def _numbered(held: Mapping[str, Array], name: str) -> list[str]:
    count = sum(path.startswith(f"{name}.") for path in held)
    return [f"{name}.{number}" for number in range(count)]
