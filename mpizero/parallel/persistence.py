"""Save and load sharded models: every rank writes and reads the ranges it owns, whatever the layout was.

A checkpoint holds the arrays of the whole, unsplit model; slices and copies (see ``mpizero.parallel.whole``) are
translated to ranges of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero import checkpoint
from mpizero.comm.agreement import all_ranks
from mpizero.errors import CheckpointError, CollectiveError, PeerFailure
from mpizero.parallel.whole import in_whole, whole_of
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine

#: The axes of a layout besides the data axis; files that do not mention one were written without it.
_AXES = ("pipeline", "tensor", "context")
#: Elements of the arrays whose ranges are verified in one reading.
_VERIFIED_AT_ONCE = 1 << 22


class ArrayReader(Protocol):
    """What a checkpoint reader offers here."""

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[checkpoint.LocalArray]) -> None:
        """Fill the pieces of ``requests``."""


def local_arrays(
    engine: Engine, *, parameters: bool = True, values: Array | None = None
) -> list[checkpoint.LocalArray]:
    """Return the ranges of every parameter and optimizer array that this rank writes, as views. Not collective.

    The arrays are those of the whole model, whatever this rank holds of it. ``values``, in the flat order, take the
    place of the parameters.
    """
    arrays: list[checkpoint.LocalArray] = []
    if parameters:
        arrays += _parameter_arrays(engine, values)
    if engine.updater is not None:
        arrays += _state_arrays(engine)
    return arrays


class _Ranges:
    """Views of ranges of the whole model's parameters, or of arrays like them, by name.

    To be written: each element by the one rank that speaks for it. To be read: all that this rank holds, copies too.
    """

    def __init__(self, engine: Engine, *, written: bool) -> None:
        self.whole, self.written, self.dtype = whole_of(engine), written, engine.dtype
        self.found: dict[str, list[tuple[int, Array]]] = {e.spec.name: [] for e in self.whole.layout.parameters}

    def add(self, spec: ParameterSpec, start: int, values: Array) -> None:
        """Add the values of elements ``start ...`` of a parameter that this rank holds."""
        if not self.written or self.whole.writes(spec):
            self.found[spec.guest or spec.name].extend(in_whole(spec, start, values))

    def arrays(self, folder: str, *, trainable: bool) -> list[checkpoint.LocalArray]:
        """List all arrays of the model, or those of trainable parameters, with this rank's ranges."""
        return [
            checkpoint.LocalArray(f"{folder}/{e.spec.name}", e.spec.shape, self.dtype, tuple(self.found[e.spec.name]))
            for e in self.whole.layout.parameters
            if e.spec.trainable or not trainable
        ]


def _parameter_arrays(
    engine: Engine, values: Array | None = None, *, written: bool = True
) -> list[checkpoint.LocalArray]:
    """Return ranges of the parameters; of ``values``, in the flat order, where they are given."""
    ranges = _Ranges(engine, written=written)
    for unit, span in zip(engine.layout.units, engine.store.share.spans, strict=True):
        owned = engine.store.owned(unit.index) if values is None else values[span.start : span.stop]
        for entry, part in engine.layout.pieces(span):
            view = owned[part.start - span.start : part.stop - span.start]
            ranges.add(entry.spec, part.start - entry.offset, view)
    return ranges.arrays("parameters", trainable=False)


def _state_arrays(engine: Engine, *, written: bool = True) -> list[checkpoint.LocalArray]:
    """Return ranges of optimizer arrays: those this rank writes, or all that it keeps."""
    updater = engine.updater
    assert updater is not None
    arrays = []
    for slot, values in updater.state.items():
        ranges = _Ranges(engine, written=written)
        for piece in updater.trees.own if written else updater.pieces:
            view = values[piece.state : piece.state + piece.size]
            ranges.add(piece.entry.spec, piece.span.start - piece.entry.offset, view)
        arrays += ranges.arrays(f"optimizer/{slot}", trainable=True)
    return arrays


def attributes(engine: Engine) -> dict[str, Any]:
    """Return what a checkpoint must know besides arrays. Not collective."""
    updater = engine.updater
    return {
        "optimizer": None
        if updater is None
        else {
            "name": optimizer_name(updater.optimizer),
            "slots": list(updater.state),
            "step_count": updater.step_count,
        },
        "step_number": engine.step_number,
        "loss_scale": None
        if engine.loss_scale is None
        else {"scale": engine.loss_scale.scale, "good_steps": engine.loss_scale.good_steps},
        "layout": {
            "strategy": "ZeRO-3" if engine.placement.strategy == "FSDP" else engine.placement.strategy,
            "ranks": engine.grid.axes.size,
            "nodes": whole_of(engine).nodes,
            **{axis: getattr(engine.grid.axes, axis) for axis in _AXES},
        },
    }


def restore(engine: Engine, reader: ArrayReader, *, strict_layout: bool = False) -> None:
    """Fill an engine from an open checkpoint; where this raises, nothing has changed. Collective over the world.

    Optimizer state is restored when the checkpoint has that of the bound optimizer; a model without one takes the
    parameters alone.

    Raises
    ------
    CheckpointError
        If it is damaged, or belongs to another model, optimizer, or (with ``strict_layout``) layout.
    """
    saved = reader.attributes.get("mpizero", {})
    with_state = engine.updater is not None and saved.get("optimizer") is not None
    with all_ranks(engine.grid.world, "restore"):
        _check_model(engine, reader)
        if strict_layout:
            _check_layout(attributes(engine)["layout"], saved.get("layout"))
        if with_state:
            _check_optimizer(engine, saved)
    requests = _parameter_arrays(engine, written=False)
    if with_state:
        requests += _state_arrays(engine, written=False)
    _read(engine, reader, requests)
    if with_state:
        _take_scalars(engine, saved)
    engine.step_number = int(saved.get("step_number", 0))
    engine.store.publish()


def _check_layout(layout: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    if layout != {**dict.fromkeys(_AXES, 1), **(saved or {})}:
        raise CheckpointError(
            f"strict_layout: the checkpoint was written by {_told(saved)}, this model is {_told(layout)}; without "
            "strict_layout it can be loaded all the same"
        )


def _told(layout: Mapping[str, Any] | None) -> str:
    if not layout:
        return "an unknown layout"
    ranks, nodes = (f"{layout[what]} {what[:-1]}{'s'[: layout[what] != 1]}" for what in ("ranks", "nodes"))
    split = ", ".join(f"{axis} {layout[axis]}" for axis in _AXES if layout.get(axis, 1) != 1)
    return f"{layout['strategy']} over {ranks} on {nodes}{f' ({split})' if split else ''}"


def restore_state(engine: Engine, reader: ArrayReader) -> None:
    """Fill the state of an engine's optimizer from an open checkpoint; where this raises, nothing has changed.

    Collective over the world.

    Raises
    ------
    CheckpointError
        If it is damaged, holds no optimizer state, or that of another optimizer.
    """
    saved = reader.attributes.get("mpizero", {})
    with all_ranks(engine.grid.world, "restore"):
        _check_optimizer(engine, saved)
    _read(engine, reader, _state_arrays(engine, written=False))
    _take_scalars(engine, saved)


def _check_optimizer(engine: Engine, saved: Mapping[str, Any]) -> None:
    updater, optimizer = engine.updater, saved.get("optimizer")
    if updater is None or optimizer is None:
        which = "model has no bound optimizer" if updater is None else "checkpoint has none"
        raise CheckpointError(f"no optimizer state to restore: the {which}")
    name = optimizer_name(updater.optimizer)
    if optimizer.get("name") != name:
        raise CheckpointError(
            f"the checkpoint holds the state of {optimizer.get('name')}, the bound optimizer is {name}: bind the same "
            "one, or load into a model without an optimizer to take the parameters alone"
        )


def _take_scalars(engine: Engine, saved: Mapping[str, Any]) -> None:
    assert engine.updater is not None
    engine.updater.step_count = int(saved["optimizer"]["step_count"])
    if saved.get("loss_scale") is not None and engine.loss_scale is not None:
        engine.loss_scale = replace(engine.loss_scale, **saved["loss_scale"])


def _read(engine: Engine, reader: ArrayReader, requests: Sequence[checkpoint.LocalArray]) -> None:
    """Fill ``requests``, or change nothing and raise on every rank.

    [Note: nothing half loaded] A model that still has its start values reads in place, and takes them again if
    something is wrong. Any other is too precious: its ranges are first read into a small buffer, only to be verified.
    Either way a rank needs no room for a second copy.
    """
    engine.memory.barrier("restore")  # who still reads parameters reads the old ones
    untouched = np.array([engine.pristine], np.int8)  # empty optimizer state looks untouched: one rank must not decide
    engine.grid.world.allreduce(untouched, "min", "restore")
    pristine = bool(untouched[0])
    try:
        with all_ranks(engine.grid.world, "restore"):
            if not pristine:
                for group in _groups(requests):
                    reader.read(group)
            reader.read([request for request in requests if request.pieces])
    except (CollectiveError, PeerFailure):
        raise
    except Exception:
        if pristine:
            engine.start_over()
        raise


def _groups(requests: Sequence[checkpoint.LocalArray]) -> Iterator[list[checkpoint.LocalArray]]:
    """Yield requests for the same ranges with new buffers, a bounded number of elements or one array at a time."""
    group: list[checkpoint.LocalArray] = []
    size = 0
    for request in requests:
        group.append(replace(request, pieces=tuple(_buffers(request))))
        size += int(np.prod(request.shape, dtype=np.int64))  # of the whole array: all ranks cut the same groups
        if size >= _VERIFIED_AT_ONCE:
            yield [member for member in group if member.pieces]
            group, size = [], 0
    yield [member for member in group if member.pieces]


def _buffers(request: checkpoint.LocalArray) -> Iterator[tuple[int, Array]]:
    """Yield the ranges of a request in one new array."""
    room, place = np.empty(sum(values.size for _, values in request.pieces), request.dtype), 0
    for start, values in request.pieces:
        yield start, room[place : place + values.size]
        place += values.size


def optimizer_name(optimizer: Any) -> str:
    """Return the name that a checkpoint knows an optimizer by: of a user's own, that of its class."""
    return str(getattr(optimizer, "name", type(optimizer).__name__))


def _check_model(engine: Engine, reader: ArrayReader) -> None:
    prefix = "parameters/"
    found = {path[len(prefix) :]: shape for path, (shape, _) in reader.arrays.items() if path.startswith(prefix)}
    wanted = {e.spec.name: e.spec.shape for e in whole_of(engine).layout.parameters}
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    different = [n for n in wanted if n in found and tuple(found[n]) != wanted[n]]
    if missing or extra or different:
        told = []
        if missing:
            told.append(f"missing {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")
        if extra:
            told.append(f"unknown {', '.join(extra[:3])}{' ...' if len(extra) > 3 else ''}")
        if different:
            name = different[0]
            told.append(f"{name} has shape {tuple(found[name])}, the model's has {wanted[name]}")
        raise CheckpointError(f"the checkpoint belongs to another model: {'; '.join(told)}")
    for path, (_, dtype) in reader.arrays.items():
        if path.startswith(prefix) and np.dtype(dtype) != engine.dtype:
            raise CheckpointError(f"{path} is {np.dtype(dtype)}, the model's parameters are {engine.dtype}")
