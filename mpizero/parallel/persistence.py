"""Save and load sharded models: every rank writes and reads the ranges it owns, whatever the layout was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero import checkpoint
from mpizero.comm.agreement import all_ranks
from mpizero.errors import CheckpointError, CollectiveError, PeerFailure
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine

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
    """Return this rank's owned ranges of every parameter and optimizer array, as views. Not collective.

    ``values``, in the flat order, take the place of the parameters.
    """
    arrays: list[checkpoint.LocalArray] = []
    if parameters:
        arrays += _parameter_arrays(engine, values)
    if engine.updater is not None:
        arrays += _state_arrays(engine, owned_only=True)
    return arrays


def _parameter_arrays(engine: Engine, whole: Array | None = None) -> list[checkpoint.LocalArray]:
    pieces: dict[str, list[tuple[int, Array]]] = {e.spec.name: [] for e in engine.layout.parameters}
    for unit, span in zip(engine.layout.units, engine.store.share.spans, strict=True):
        values = engine.store.owned(unit.index) if whole is None else whole[span.start : span.stop]
        for entry, part in engine.layout.pieces(span):
            view = values[part.start - span.start : part.stop - span.start]
            pieces[entry.spec.name].append((part.start - entry.offset, view))
    return [
        checkpoint.LocalArray(f"parameters/{e.spec.name}", e.spec.shape, engine.dtype, tuple(pieces[e.spec.name]))
        for e in engine.layout.parameters
    ]


def _state_arrays(engine: Engine, *, owned_only: bool) -> list[checkpoint.LocalArray]:
    """Return ranges of optimizer arrays: those this rank writes, or all that it keeps."""
    updater = engine.updater
    assert updater is not None
    kept = updater.trees.own if owned_only else updater.pieces
    arrays = []
    for slot, values in updater.state.items():
        pieces: dict[str, list[tuple[int, Array]]] = {}
        for piece in kept:
            view = values[piece.state : piece.state + piece.size]
            pieces.setdefault(piece.entry.spec.name, []).append((piece.span.start - piece.entry.offset, view))
        arrays += [
            checkpoint.LocalArray(
                f"optimizer/{slot}/{e.spec.name}", e.spec.shape, engine.dtype, tuple(pieces.get(e.spec.name, ()))
            )
            for e in engine.layout.parameters
            if e.spec.trainable
        ]
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
            "ranks": engine.grid.data.size,
            "nodes": engine.grid.peers.size,
        },
    }


def restore(engine: Engine, reader: ArrayReader, *, strict_layout: bool = False) -> None:
    """Fill an engine from an open checkpoint; where this raises, nothing has changed. Collective over the data group.

    Optimizer state is restored when the checkpoint has that of the bound optimizer; a model without one takes the
    parameters alone.

    Raises
    ------
    CheckpointError
        If it is damaged, or belongs to another model, optimizer, or (with ``strict_layout``) layout.
    """
    saved = reader.attributes.get("mpizero", {})
    with_state = engine.updater is not None and saved.get("optimizer") is not None
    with all_ranks(engine.grid.data, "restore"):
        _check_model(engine, reader)
        if strict_layout and (layout := attributes(engine)["layout"]) != saved.get("layout"):
            raise CheckpointError(
                f"strict_layout: the checkpoint was written by {_told(saved.get('layout'))}, this model is "
                f"{_told(layout)}; without strict_layout it can be loaded all the same"
            )
        if with_state:
            _check_optimizer(engine, saved)
    requests = _parameter_arrays(engine)
    if with_state:
        requests += _state_arrays(engine, owned_only=False)
    _read(engine, reader, requests)
    if with_state:
        _take_scalars(engine, saved)
    engine.step_number = int(saved.get("step_number", 0))
    engine.store.publish()


def _told(layout: Mapping[str, Any] | None) -> str:
    if not layout:
        return "an unknown layout"
    ranks, nodes = (f"{layout[what]} {what[:-1]}{'s'[: layout[what] != 1]}" for what in ("ranks", "nodes"))
    return f"{layout['strategy']} over {ranks} on {nodes}"


def restore_state(engine: Engine, reader: ArrayReader) -> None:
    """Fill the state of an engine's optimizer from an open checkpoint; where this raises, nothing has changed.

    Collective over the data group.

    Raises
    ------
    CheckpointError
        If it is damaged, holds no optimizer state, or that of another optimizer.
    """
    saved = reader.attributes.get("mpizero", {})
    with all_ranks(engine.grid.data, "restore"):
        _check_optimizer(engine, saved)
    _read(engine, reader, _state_arrays(engine, owned_only=False))
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
    pristine = engine.pristine
    try:
        with all_ranks(engine.grid.data, "restore"):
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
        pieces = tuple((start, np.empty_like(values)) for start, values in request.pieces)
        group.append(replace(request, pieces=pieces))
        size += int(np.prod(request.shape, dtype=np.int64))  # of the whole array: all ranks cut the same groups
        if size >= _VERIFIED_AT_ONCE:
            yield [member for member in group if member.pieces]
            group, size = [], 0
    yield [member for member in group if member.pieces]


def optimizer_name(optimizer: Any) -> str:
    """Return the name that a checkpoint knows an optimizer by: of a user's own, that of its class."""
    return str(getattr(optimizer, "name", type(optimizer).__name__))


def _check_model(engine: Engine, reader: ArrayReader) -> None:
    prefix = "parameters/"
    found = {path[len(prefix) :]: shape for path, (shape, _) in reader.arrays.items() if path.startswith(prefix)}
    wanted = {e.spec.name: e.spec.shape for e in engine.layout.parameters}
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
