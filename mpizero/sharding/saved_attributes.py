"""Read and check the contents of a checkpoint: attributes (all training state except the arrays), and arrays.

A file may come from anybody, so :func:`read_attribute` checks every value. Two attributes decide whether a resumed
training continues with the same bits: how global batches are cut into grains, and the number of tiles
(docs/concepts.md). The learning rate is recorded to warn if loading changes it. :func:`fill_arrays` reads the arrays
into the memory of the ranks, all of them or none.

[Note: slices are read by rows] A rank of a tensor group may hold some columns of a matrix. In the file such columns are
one short range in each row, and reading and verifying many short ranges is slow. Therefore the ranks of the group read
whole rows, each rank an equal share. The ranks exchange the rows, a limited number of elements at a time, and every
rank copies its columns out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpizero import checkpoint, optim
from mpizero._util.text import notice
from mpizero.checkpoint.format import is_count, is_number, number_of
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, all_ranks
from mpizero.comm.reduce import EXCHANGE_ELEMENTS
from mpizero.errors import CheckpointError, CollectiveError, PeerFailure
from mpizero.layout import Partition, Span
from mpizero.layout.batch import GrainRule
from mpizero.layout.sum_tree import ORDER
from mpizero.layout.tensor_parts import part_rows, take_rows
from mpizero.optim.elementwise import learning_rate
from mpizero.sharding.exactness import tiles_setting
from mpizero.sharding.full_params import global_ranges
from mpizero.sharding.partition import TILED_AXES, ParallelLayout, can_host
from mpizero.sharding.placed_model import PartialLoad
from mpizero.sharding.update import Updater
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.checkpoint import LocalArray
    from mpizero.sharding.engine import Engine


#: The axes of a layout besides the data axis. If a checkpoint does not have one, its size was 1.
AXES = ("pipeline", "tensor", "context")


def read_attribute(reader: ArrayReader) -> dict[str, Any]:
    """Return the attribute ``mpizero`` of a checkpoint, after checking all of it, because a file may hold any JSON.

    A missing key counts as None, a missing ``step_number`` as 0: other programs may not write them. Unknown keys raise
    ``CheckpointError``, because their meaning is unknown.
    """
    saved, where = reader.attributes.get("mpizero", {}), "the checkpoint's attribute 'mpizero'"
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where} is {saved!r:.80}: expected an object")
    if unknown := sorted(saved.keys() - _SAVED.keys()):
        raise CheckpointError(f"{where}: {unknown[0]!r:.80} is unknown; expected {', '.join(_SAVED)}")
    attribute: dict[str, Any] = dict.fromkeys(_SAVED) | {"step_number": 0} | saved
    for key, (is_valid, expected) in _SAVED.items():
        if not is_valid(attribute[key]):
            raise CheckpointError(f"{where}: {key} is {attribute[key]!r:.200}: expected {expected}")
    return attribute


def check_layout(layout: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    """Raise :class:`CheckpointError` if the checkpoint's layout, ``saved``, is not the model's, ``layout``."""
    if {"domain": 1, **layout} != {**dict.fromkeys(AXES, 1), "domain": 1, **(saved or {})}:
        raise CheckpointError(
            f"strict_layout: the checkpoint was written by {_layout_text(saved)}, this model is "
            f"{_layout_text(layout)}; without strict_layout it can be loaded all the same"
        )


def axis_record(parallel_layout: ParallelLayout) -> dict[str, int]:
    """Return the checkpoint's record of the sizes of the axes; a domain's size is its number of ranks."""
    sizes = {axis: getattr(parallel_layout, axis) for axis in AXES}
    return sizes | ({"domain": math.prod(parallel_layout.domain)} if parallel_layout.domain else {})


def _layout_text(layout: Mapping[str, Any] | None) -> str:
    if not layout:
        return "an unknown layout"
    ranks, nodes = (f"{layout[what]} {what[:-1]}{'s'[: layout[what] != 1]}" for what in ("ranks", "nodes"))
    split = ", ".join(f"{axis} {layout[axis]}" for axis in (*AXES, "domain") if layout.get(axis, 1) != 1)
    return f"{layout['strategy']} over {ranks} on {nodes}{f' ({split})' if split else ''}"


#: What errors say is expected of the record.
EXPECTED_GRAINS = (
    "null, or order (text), micro_batch and efficient (null or whole number >= 1), accumulate (the same, no null), "
    "coarse (true or false); for a small model least (whole number >= 1), and where sums are rounded wire (text)"
)
#: What a checkpoint without a record means: the default of the versions that wrote none.
_BEFORE = {"micro_batch": None, "efficient": None, "coarse": False, "least": 1}


def grain_record(rule: GrainRule, wire: str | None) -> dict[str, Any]:
    """Return what a checkpoint records of a grain rule (how batches are cut into grains) and of ``Config.wire``.

    The record consists of plain JSON values.
    """
    written = {name: value for name, value in asdict(rule).items() if name != "least" or value > 1}
    return {"order": ORDER, **written, **({} if wire is None else {"wire": wire})}


def is_grain_record(value: object) -> bool:
    """Tell whether ``value``, any JSON value from a checkpoint, is None or of the form of :func:`grain_record`."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() | {"coarse", "least", "wire"} == {"order", "accumulate", "wire", *_BEFORE}
        and isinstance(value.get("coarse", False), bool)  # older versions wrote none
        and is_count(value.get("least", 1), 1)
        and isinstance(value.get("wire", ""), str)
        and isinstance(value["order"], str)
        and is_count(value["accumulate"], 1)
        and all(value[name] is None or is_count(value[name], 1) for name in ("micro_batch", "efficient"))
    )


def check_order(record: Mapping[str, Any] | None) -> None:
    """Raise :class:`CheckpointError` if a checkpoint's :func:`grain_record` names an unknown order of adding gradients.

    There is one known order, that of the binary tree; None, no record, is accepted.
    """
    if record is not None and record["order"] != ORDER:
        raise CheckpointError(
            f"the checkpoint's training added the gradients of grains in the order {record['order']!r:.80}, which this "
            f"version does not know; it knows {ORDER!r}: go on with the version that wrote the checkpoint, or load it "
            "into a model without an optimizer to take the parameters alone"
        )


def resume_grains(engine: Engine, record: Mapping[str, Any] | None) -> None:
    """Cut global batches from now on into grains as the training that wrote the checkpoint did.

    Not collective; every rank calls it. ``record`` is what :func:`grain_record` returned for the checkpoint; None if
    the checkpoint has no record. A ``micro_batch`` that the user has set is kept. Rank 0 prints a notice if that
    setting, ``accumulate`` or ``wire`` differs from the record, and if the recorded ``micro_batch`` is used.
    """
    config, rule = engine.config, engine.config.grain_rule(engine.model)
    recorded = _BEFORE if record is None else {name: record.get(name, before) for name, before in _BEFORE.items()}
    engine.grain_rule = rule if config.micro_batch is not None else replace(rule, **recorded)
    if record is None or not engine.prints_notices:
        return
    theirs = _said(record["micro_batch"], record["accumulate"], record.get("wire"))
    same = (config.accumulate, config.wire) == (record["accumulate"], record.get("wire"))
    if not same or config.micro_batch not in (None, record["micro_batch"]):
        ours = _said(engine.grain_rule.micro_batch, config.accumulate, config.wire)
        unsure = record["micro_batch"] is None and same
        notice(
            f"the checkpoint was trained with {theirs}, this training goes on with {ours}: "
            f"{'where these are not the same number of samples, ' if unsure else ''}"
            "not with the bits of a run that was never interrupted"
        )
    elif config.micro_batch is None and record["micro_batch"] is not None:
        notice(f"training goes on with {theirs}, as the checkpoint says; set micro_batch to change it")


def _said(micro_batch: int | None, accumulate: int, wire: str | None) -> str:
    text = "the default micro_batch" if micro_batch is None else f"micro_batch={micro_batch}"
    text += f" and accumulate={accumulate}" if accumulate > 1 else ""
    return text + (f" and wire={wire!r}" if wire is not None else "")


#: What errors say is expected of the record.
EXPECTED_TILES = "null, or tensor and context (whole numbers >= 1)"


def tile_record(parallel_layout: ParallelLayout) -> dict[str, dict[str, int]]:
    """Return the checkpoint's record of the numbers of tiles; empty if these are the sizes of the groups."""
    tiles = parallel_layout.wanted_virtual_ranks
    return {} if tiles == {axis: getattr(parallel_layout, axis) for axis in TILED_AXES} else {"tiles": tiles}


def is_tile_record(value: object) -> bool:
    """Tell whether ``value``, any JSON value from a checkpoint, is a number of tiles for each axis, or None."""
    return value is None or (
        isinstance(value, dict) and value.keys() == set(TILED_AXES) and all(is_count(n, 1) for n in value.values())
    )


def recorded_tiles(saved: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the number of tiles on each axis in the training that wrote a checkpoint; None if it is unknown.

    ``saved`` is the checkpoint's attribute ``mpizero``. In a checkpoint without a record of tiles, the numbers are the
    sizes of its groups.
    """
    sizes: Mapping[str, Any] | None = saved.get("tiles") or saved.get("layout")
    return None if sizes is None else {axis: sizes.get(axis, 1) for axis in TILED_AXES}


def warn_tiles(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Print a notice on rank 0 if the model has other numbers of tiles than the training that wrote the checkpoint.

    Not collective. There is one number for each of the axes tensor and context. ``saved`` is the checkpoint's attribute
    ``mpizero``.
    """
    theirs, layout = recorded_tiles(saved), engine.partitioned.parallel_layout
    if theirs is None or theirs == layout.virtual_ranks or not engine.prints_notices:
        return
    unfit = [axis for axis in TILED_AXES if not can_host(getattr(layout, axis), theirs[axis])]
    advice = (
        f"no tiles keep those with {unfit[0]}={getattr(layout, unfit[0])}"
        if unfit
        else f"ShardingConfig({tiles_setting(theirs)}) keeps those"
    )
    notice(
        f"the checkpoint was trained with {tiles_setting(theirs)}, this training goes on with "
        f"{tiles_setting(layout.virtual_ranks)}: not with the bits of a run that was never interrupted; {advice}"
    )


def _is_optimizer(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and {"name", "slots", "step_count"} <= value.keys() <= {"name", "slots", "step_count", "progress"}
        and ("progress" not in value or _is_progress(value["progress"]))
        and isinstance(value["name"], str)
        and isinstance(value["slots"], list)
        and all(isinstance(slot, str) for slot in value["slots"])
        and is_count(value["step_count"])
    )


def _is_progress(value: object) -> bool:
    from mpizero.optim.minimizers import is_progress  # only what such a method has saved has progress

    return is_progress(value)


def _is_scale(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"scale", "good_steps"}
        and is_number(value["scale"])
        and is_count(value["good_steps"])
    )


def _is_layout(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and {"strategy", "ranks", "nodes"} <= value.keys() <= {"strategy", "ranks", "nodes", "domain", *AXES}
        and isinstance(value["strategy"], str)
        and all(is_count(number, 1) for key, number in value.items() if key != "strategy")
    )


def _is_tied(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(home, str) for home in value.values()))


#: Keys of the attribute ``mpizero``, each with a check of its value, and what errors say is expected.
_SAVED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "optimizer": (
        _is_optimizer,
        "null, or name (text), slots (list of texts), step_count (whole number >= 0) and perhaps progress",
    ),
    "step_number": (is_count, "a whole number >= 0"),
    "loss_scale": (_is_scale, "null, or scale (finite number > 0) and good_steps (whole number >= 0)"),
    "layout": (
        _is_layout,
        "null, or strategy (text), ranks and nodes, perhaps pipeline, tensor and context (whole numbers >= 1)",
    ),
    "grains": (is_grain_record, EXPECTED_GRAINS),
    "tiles": (is_tile_record, EXPECTED_TILES),
    "tied": (_is_tied, "null, or names of parameters, each with the name of the one whose values it shares"),
}
#: Name of the checkpoint attribute that holds the learning rate.
LEARNING_RATE = "learning_rate"


def learning_rate_record(updater: Updater | None) -> dict[str, Any]:
    """Return the checkpoint attribute :data:`LEARNING_RATE`, a dict with the keys ``last`` and ``schedule``.

    Not collective. ``last`` is the learning rate of the last step, None if unknown. ``schedule`` holds the settings of
    the optimizer's learning-rate schedule if that is one of the library's, else None.
    """
    last = None if updater is None else updater.last_rate
    schedule = _schedule(updater)
    return {"last": last if last is not None and math.isfinite(last) else None, "schedule": schedule}


def learning_rate_change(updater: Updater, attributes: Mapping[str, Any], steps: int) -> str | None:
    """Describe how the bound optimizer's schedule or learning rate differs from the checkpoint's.

    The two schedules are compared if both are known, and then the learning rates of the checkpoint's last step. Return
    None if no difference is found. Not collective.

    Parameters
    ----------
    updater : Updater
        Holds the bound optimizer.
    attributes : mapping
        All attributes of the checkpoint, by name.
    steps : int
        Number of optimizer steps before the checkpoint was saved.

    Raises
    ------
    CheckpointError
        If the attribute :data:`LEARNING_RATE` does not have the form that :func:`learning_rate_record` returns.
    """
    saved, last = attributes.get(LEARNING_RATE), last_learning_rate(attributes)
    if saved is None:
        return None
    before, now = saved.get("schedule"), _schedule(updater)
    if before is not None and now is not None and before != now:
        return f"the checkpoint was trained with the schedule {before!r:.200}, the bound optimizer has {now!r}"
    if last is None or not steps:
        return None
    rate = learning_rate(updater.optimizer, steps - 1)
    if math.isnan(rate) or rate == last:
        return None
    return f"the learning rate of step {steps} was {last!r}, the bound optimizer's is {rate!r} there"


def last_learning_rate(attributes: Mapping[str, Any]) -> float | None:
    """Return the learning rate of the last step before a checkpoint was saved; None if unknown.

    ``attributes`` are all attributes of the checkpoint, by name. Not collective.

    Raises
    ------
    CheckpointError
        If the attribute :data:`LEARNING_RATE` does not have the form that :func:`learning_rate_record` returns.
    """
    saved = attributes.get(LEARNING_RATE)
    if saved is None:
        return None
    last = saved.get("last") if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or not (last is None or (isinstance(last, float) and math.isfinite(last))):
        raise CheckpointError(
            f"the checkpoint's attribute {LEARNING_RATE!r} cannot be what mpizero wrote: {saved!r:.200}"
        )
    return last


def _schedule(updater: Updater | None) -> dict[str, Any] | None:
    lr = None if updater is None else getattr(updater.optimizer, "lr", None)
    return None if not isinstance(lr, optim.Schedule) else asdict(lr) | {"lr": float(lr.lr), "end": float(lr.end)}


#: Elements of the arrays that are read and verified together, into extra memory, for a model that is in use.
VERIFIED_AT_ONCE = 1 << 22
#: Slices are read by rows if their ranges are shorter than this on average, in bytes.
_SHORT_RANGE = 1 << 18


class ArrayReader(Protocol):
    """Define the part of :class:`mpizero.checkpoint.Reader` that restoring needs.

    ``arrays`` holds the shape and type of each array by its name in the checkpoint; ``attributes`` are the checkpoint's
    attributes by name.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[LocalArray]) -> None:
        """Read the ranges of arrays that ``requests`` list into the memory of their pieces, and verify the values.

        Collective.
        """


class ArrayPiece(NamedTuple):
    """Hold a view of consecutive elements of a parameter, or of its optimizer state, in this rank's memory.

    ``start`` is the index of the first element in the flattened parameter, or in this rank's slice if a tensor group
    splits the parameter. ``spec`` describes the parameter as this rank holds it.
    """

    spec: ParameterSpec
    start: int
    values: Array


@dataclass(frozen=True)
class SavedArray:
    """Describe an array of a checkpoint, and the pieces (ranges of its elements) that this rank holds.

    ``path`` is the array's name in the checkpoint. ``spec`` describes the parameter in the whole model. ``real`` is the
    type of the real numbers in memory; a complex element consists of two.
    """

    path: str
    spec: ParameterSpec
    real: np.dtype[Any]
    pieces: list[ArrayPiece] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the checkpoint."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the array in the checkpoint."""
        return self.spec.element_type(self.real)

    def local(self) -> LocalArray:
        """Return the array with its pieces as ranges of the whole array, the form that checkpoint readers take."""
        ranges = (part for piece in self.pieces for part in global_ranges(*piece))
        return checkpoint.LocalArray(self.path, self.shape, self.dtype, tuple(ranges))


@contextmanager
def opened_alike(comm: Communicator, what: str, data: bytes) -> Iterator[checkpoint.Reader]:
    """Yield a reader of a serialized model, after checking that all ranks pass equal bytes. Collective over ``comm``.

    The check compares the attributes and the stored checksums of the arrays. The check is the operation's first
    communication; ``what`` is the operation's name in error messages.

    Raises
    ------
    CheckpointError
        On every rank, if the bytes are damaged, crafted or not a serialized model.
    ConfigError
        If ranks pass different bytes.
    """
    readers = []

    def contents() -> dict[str, Any]:
        readers.append(reader := checkpoint.from_bytes(data))
        named = {f"array {path!r}": np.array(sums, np.uint32) for path, sums in sorted(reader.checksums().items())}
        return {**named, "the attributes": repr(sorted(reader.attributes.items()))}

    agree_arrays(comm, what, contents)
    with readers[0] as reader:
        yield reader


def fill_arrays(engine: Engine, reader: ArrayReader, arrays: Sequence[SavedArray]) -> None:
    """Read this rank's pieces of ``arrays``, or change nothing and raise on every rank. Collective over the world.

    [Note: partial loads] If the model still has its initial values, the arrays are read straight into its memory; after
    an error the model gets its initial values again. If the model has been trained or loaded, its values must not be
    lost. Then the arrays are read into extra memory, a group of arrays of limited size at a time, and copied into the
    model when all ranks have verified what they read. If there are several groups, all of them are first read once only
    to be verified, and then read again and copied. So no rank needs memory for a second copy of the model. The model is
    left partially loaded only if the second reading fails after a group was copied. Then
    :attr:`Engine.partially_loaded` is set, and the model raises an error on every use until a checkpoint has been
    loaded completely.

    Parameters
    ----------
    engine : Engine
        Holds the parameters and the optimizer state that are filled.
    reader : ArrayReader
        The checkpoint.
    arrays : sequence of SavedArray
        The same arrays in the same order on every rank, also those of which a rank has no piece.
    """
    engine.memory.barrier("restore")  # other ranks may still read the old parameters in the shared window
    # A rank without optimizer state always looks untouched: so all ranks decide together.
    untouched = np.array([engine.is_initial], np.int8)
    engine.grid.world.allreduce(untouched, "min", "restore")
    rows, world = RowReader(engine.grid.tensor, arrays), engine.grid.world
    if untouched[0]:
        try:
            for group in _groups(arrays) if engine.grid.axes.tensor > 1 else [list(arrays)]:
                requests = [rows.request(array) for array in group]
                _read(world, reader, requests)
                rows.deliver(group, requests)
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            engine.start_over()
            raise
    else:
        _fill_in_use(engine, reader, rows, list(_groups(arrays)))
    if engine.partially_loaded is not None:
        engine.partially_loaded = engine.partially_loaded.without(array.path for array in arrays)


def _fill_in_use(engine: Engine, reader: ArrayReader, rows: RowReader, groups: Sequence[Sequence[SavedArray]]) -> None:
    """Read arrays into a model that has been trained or loaded, one of ``groups`` of arrays after the other.

    See [Note: partial loads] in :func:`fill_arrays`.
    """
    world, changed = engine.grid.world, False
    for group in groups if len(groups) > 1 else ():
        _read_aside(world, reader, rows, group)
    try:
        for group in groups:
            requests, aside = _read_aside(world, reader, rows, group)
            changed = True
            for request, copy in zip(requests, aside, strict=True):
                for (_, values), (_, new_values) in zip(request.pieces, copy.pieces, strict=True):
                    values[:] = new_values
            rows.deliver(group, requests)
    except (CollectiveError, PeerFailure):
        raise
    except Exception as error:
        if changed:
            paths = {array.path for group in groups for array in group}
            earlier = engine.partially_loaded.paths if engine.partially_loaded is not None else ()
            engine.partially_loaded = PartialLoad(frozenset(paths.union(earlier)), f"{type(error).__name__}: {error}")
        raise


def _read_aside(
    world: Communicator, reader: ArrayReader, rows: RowReader, group: Sequence[SavedArray]
) -> tuple[list[LocalArray], list[LocalArray]]:
    """Read a group of arrays into new memory and verify them.

    Returns
    -------
    (list of LocalArray, list of LocalArray)
        Two lists of the ranges of arrays that this rank has read: with the memory to which the values are to be copied,
        and with the new memory that holds the values.
    """
    with all_ranks(world, "restore"):
        requests = [rows.request(array) for array in group]
        aside = [_fresh(request) for request in requests]
    _read(world, reader, aside)
    return requests, aside


def _read(world: Communicator, reader: ArrayReader, requests: Sequence[LocalArray]) -> None:
    with all_ranks(world, "restore"):
        reader.read([request for request in requests if request.pieces])


def _groups(arrays: Sequence[SavedArray]) -> Iterator[list[SavedArray]]:
    """Cut the list of arrays into groups of whole arrays, each group about :data:`VERIFIED_AT_ONCE` elements long.

    The groups are the same on every rank.
    """
    group: list[SavedArray] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += int(np.prod(array.shape, dtype=np.int64))
        if size >= VERIFIED_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _fresh(request: LocalArray) -> LocalArray:
    """Return a request to read the same ranges of an array as ``request``, into newly allocated memory."""
    real = number_of(np.dtype(request.dtype))
    memory, offset, pieces = np.empty(sum(v.size for _, v in request.pieces), real), 0, []
    for start, values in request.pieces:
        pieces.append((start, memory[offset : offset + values.size]))
        offset += values.size
    return checkpoint.LocalArray(request.path, request.shape, request.dtype, tuple(pieces))


class _Need(NamedTuple):
    """Describe the rows that a rank needs of an array that a tensor group splits.

    ``cover`` is the range of elements of the whole array that these rows make up; ``row`` is the number of elements of
    a row of the whole array. ``short`` tells whether the ranges of this rank's slice are too short to be read one by
    one.
    """

    cover: Span
    row: int
    short: bool

    @classmethod
    def of(cls, array: SavedArray) -> _Need | None:
        """Describe which rows of ``array`` this rank needs; return None if the rank holds no slice of the array."""
        sliced = [(part_rows(piece.spec.part), piece) for piece in array.pieces if piece.spec.part is not None]
        sliced = [(rows, piece) for rows, piece in sliced if piece.values.size]
        if not sliced:
            return None
        rows = sliced[0][0]
        first = min(piece.start // rows.local for _, piece in sliced)
        last = max(-(-(piece.start + piece.values.size) // rows.local) for _, piece in sliced)
        length = rows.local * array.dtype.itemsize // len(rows.runs)
        cover = Span(first * rows.full, last * rows.full)
        return cls(cover, rows.full, rows.number > 1 and length < _SHORT_RANGE)


class RowReader:
    """Read rows of the arrays that a tensor group splits, each row on one rank only, and give each rank its slices.

    Construction is collective over the group.

    Parameters
    ----------
    group : Communicator
        The tensor group.
    arrays : sequence of SavedArray
        The arrays to read.
    """

    def __init__(self, group: Communicator, arrays: Sequence[SavedArray]) -> None:
        self.group = group
        self._needs: dict[str, _Need] = {}
        if group.size == 1:
            return
        local = {array.path: need for array in arrays if (need := _Need.of(array)) is not None}
        gathered = group.allgather_object(local, "rows of slices")
        for path in sorted({path for needs in gathered for path in needs}):
            needs = [needs[path] for needs in gathered if path in needs]
            if any(need.short for need in needs):
                cover = Span(min(need.cover.start for need in needs), max(need.cover.stop for need in needs))
                self._needs[path] = needs[0]._replace(cover=cover)

    def request(self, array: SavedArray) -> LocalArray:
        """Return the request by which this rank reads ``array``.

        If the ranges of all slices are long enough, the request is for this rank's pieces, in their own memory.
        Otherwise the request is for this rank's share of the rows that the group needs, in a new buffer.
        """
        if array.path not in self._needs:
            return array.local()
        part = self._parts(array.path)[self.group.rank]
        pieces = ((part.start, np.empty(part.size, array.dtype)),) if part.size else ()
        return checkpoint.LocalArray(array.path, array.shape, array.dtype, pieces)

    def deliver(self, arrays: Sequence[SavedArray], requests: Sequence[LocalArray]) -> None:
        """Exchange the rows that the ranks have read, and copy each rank's slices out of them.

        Collective over the group. ``requests`` are those that :meth:`request` returned for ``arrays``, after reading.
        """
        for array, request in zip(arrays, requests, strict=True):
            if array.path in self._needs:
                self._deliver(array, request)

    def _deliver(self, array: SavedArray, request: LocalArray) -> None:
        cover, row, _ = self._needs[array.path]
        parts = self._parts(array.path)
        local = parts[self.group.rank]
        read = request.pieces[0][1] if request.pieces else np.empty(0, array.dtype)
        step = max(1, EXCHANGE_ELEMENTS // row) * row
        for start in range(cover.start, cover.stop, step):
            window = Span(start, min(start + step, cover.stop))
            cut = local.intersect(window).shift(-local.start)
            rows = np.empty(window.size, array.dtype)
            counts = [part.intersect(window).size for part in parts]
            self.group.allgatherv(read[cut.start : cut.stop] if cut.size else read[:0], rows, counts, "rows")
            for piece in array.pieces:
                _take(piece, rows, window)

    def _parts(self, path: str) -> list[Span]:
        """Return, for each rank of the group, the range of elements of the array ``path`` that it reads."""
        cover = self._needs[path].cover
        shards = Partition(cover.size, self.group.size)
        return [Span(shard.start, shard.stop).shift(cover.start) for shard in shards]


def _take(piece: ArrayPiece, window: Array, where: Span) -> None:
    """Copy those elements of ``piece``, a part of this rank's slice, that lie in ``window`` to the piece's own array.

    ``window`` holds complete rows of the whole array; ``where`` is the range of elements of these rows in the array.
    """
    assert piece.spec.part is not None
    rows = part_rows(piece.spec.part)
    first, last = where.start // rows.full * rows.local, where.stop // rows.full * rows.local
    cut = Span(piece.start, piece.start + piece.values.size).intersect(Span(first, last))
    take_rows(rows, window, cut.start - first, piece.values[cut.start - piece.start : cut.stop - piece.start])
