"""Save and load sharded models: every rank writes and reads the ranges it owns, whatever the layout was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero import checkpoint
from mpizero.errors import CheckpointError
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.parallel.base import ShardedModelBase
    from mpizero.parallel.engine import Engine


class ArrayReader(Protocol):
    """What a checkpoint reader offers here."""

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[checkpoint.LocalArray]) -> None:
        """Fill the pieces of ``requests``."""


def local_arrays(engine: Engine, *, parameters: bool = True, state: bool = True) -> list[checkpoint.LocalArray]:
    """Return this rank's owned ranges of every parameter and optimizer array, as views. Not collective."""
    arrays: list[checkpoint.LocalArray] = []
    if parameters:
        arrays += _parameter_arrays(engine)
    if state and engine.updater is not None:
        arrays += _state_arrays(engine, owned_only=True)
    return arrays


def _parameter_arrays(engine: Engine) -> list[checkpoint.LocalArray]:
    pieces: dict[str, list[tuple[int, Array]]] = {e.spec.name: [] for e in engine.layout.parameters}
    for unit, span in zip(engine.layout.units, engine.store.share.spans, strict=True):
        values = engine.store.owned(unit.index)
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
            "name": type(updater.optimizer).__name__,
            "slots": list(updater.state),
            "step_count": updater.step_count,
        },
        "step_number": engine.step_number,
        "loss_scale": None
        if engine.loss_scale is None
        else {"scale": engine.loss_scale.scale, "good_steps": engine.loss_scale.good_steps},
        "layout": {
            "strategy": engine.placement.strategy,
            "ranks": engine.grid.data.size,
            "nodes": engine.grid.peers.size,
        },
    }


def restore(engine: Engine, reader: ArrayReader, *, strict_layout: bool = False) -> None:
    """Fill an engine from an open checkpoint. Collective over the data group.

    Optimizer state is restored when the checkpoint has that of the bound optimizer; a model without one takes the
    parameters alone.

    Raises
    ------
    CheckpointError
        If it belongs to another model, optimizer, or (with ``strict_layout``) layout.
    """
    saved = reader.attributes.get("mpizero", {})
    _check_model(engine, reader)
    if strict_layout and (layout := attributes(engine)["layout"]) != saved.get("layout"):
        raise CheckpointError(f"strict_layout: the checkpoint was written by {saved.get('layout')}, this is {layout}")
    reader.read([array for array in _parameter_arrays(engine) if array.pieces])
    if engine.updater is not None and saved.get("optimizer") is not None:
        restore_state(engine, reader)
    engine.step_number = int(saved.get("step_number", 0))
    engine.store.publish()


def restore_state(engine: Engine, reader: ArrayReader) -> None:
    """Fill the state of an engine's optimizer from an open checkpoint. Collective over the data group.

    Raises
    ------
    CheckpointError
        If it holds no optimizer state, or that of another optimizer.
    """
    saved = reader.attributes.get("mpizero", {})
    updater, optimizer = engine.updater, saved.get("optimizer")
    if updater is None or optimizer is None:
        raise CheckpointError("no optimizer state to restore: the checkpoint or the model has none")
    name = type(updater.optimizer).__name__
    if optimizer.get("name") != name:
        raise CheckpointError(
            f"the checkpoint holds the state of {optimizer.get('name')}, the bound optimizer is {name}"
        )
    reader.read([array for array in _state_arrays(engine, owned_only=False) if array.pieces])
    updater.step_count = int(optimizer["step_count"])
    if saved.get("loss_scale") is not None and engine.loss_scale is not None:
        engine.loss_scale = replace(engine.loss_scale, **saved["loss_scale"])


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


def save(model: ShardedModelBase, path: str | Path) -> None:
    """Write a model to a folder, in place of what was there. Collective."""
    checkpoint.write(
        path, model.checkpoint_arrays(), model.checkpoint_attributes(), model.config.communicator, replace=True
    )


def load(model: ShardedModelBase, path: str | Path, *, strict_layout: bool) -> None:
    """Read a model from a folder. Collective."""
    with checkpoint.open_checkpoint(path, model.config.communicator) as reader:
        restore(model.engine, reader, strict_layout=strict_layout)
    model.invalidate_cache()


def to_bytes(model: ShardedModelBase) -> bytes:
    """Return a model as bytes, the same on every rank. Collective."""
    return checkpoint.to_bytes(model.checkpoint_arrays(), model.checkpoint_attributes(), model.config.communicator)


def from_bytes(model: ShardedModelBase, data: bytes) -> None:
    """Take a model from bytes. Collective."""
    with checkpoint.from_bytes(data) as reader:
        restore(model.engine, reader)
    model.invalidate_cache()
