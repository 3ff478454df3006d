"""Gather arrays of the whole model, of parameters' elements or of optimizer state, and check a state to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpizero.comm.reduce import gather_spans
from mpizero.errors import LayoutError
from mpizero.layout.flat import FlatLayout, ParameterUse
from mpizero.optim.elementwise import state_specs
from mpizero.parallel.engine import Engine
from mpizero.parallel.optimizer.sharded_update import Updater
from mpizero.parallel.parameters.shards import Share, UpdatePiece
from mpizero.types import Array


def gather_pieces(engine: Engine, dtype: Any, values: Callable[[UpdatePiece], Any]) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. It is 0 for frozen and averaged parameters.
    Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model, with a bound optimizer.
    dtype : dtype
        Element type of the result.
    values : callable
        Called with each :class:`UpdatePiece` (a range of one parameter) that this rank owns. It returns the numbers for
        this range: an array as long as the range, or one number for all of it.
    """
    full = np.zeros(engine.layout.size, dtype)
    for piece in engine.pieces():
        full[piece.span.start : piece.span.stop] = values(piece)
    return _gathered(engine, full)


def gather_owned(engine: Engine, owned: Array) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    owned : 1-D array
        This rank's numbers: one for each element of the ranges that it owns, one range after the other.
    """
    full, share = np.empty(engine.layout.size, owned.dtype), engine.store.share
    for span, offset in zip(share.spans, share.offsets, strict=True):
        full[span.start : span.stop] = owned[offset : offset + span.size]
    return _gathered(engine, full)


def slot_entries(engine: Engine, slot: str) -> tuple[ParameterUse, ...]:
    """Return where each array of a slot of the optimizer state lies in the vector of :func:`gather_slot`.

    Arrays as long as the parameters lie where the parameters lie in the vector of the whole model, those of whole
    tensors one after the other. Not collective; the engine has a bound optimizer.
    """
    optimizer = _updater(engine).optimizer
    found = [(e, state_specs(optimizer, e.spec).get(slot)) for e in engine.whole.layout.parameters]
    if slot in optimizer.slots:
        return tuple(entry for entry, spec in found if spec is not None)
    return FlatLayout.build({"": [spec for _, spec in found if spec is not None]}, one_unit=True).parameters


def gather_slot(engine: Engine, slot: str) -> Array:
    """Gather the arrays of a slot of the optimizer state of the whole model, as one vector on every rank.

    :func:`slot_entries` says where each array lies; elements that belong to none are 0. Collective over the world.
    """
    updater = _updater(engine)
    if slot not in updater.optimizer.slots:
        return _gathered_tensors(engine, slot)

    def values(piece: UpdatePiece) -> Array | int:
        found = updater.state_of(slot, piece)
        return found if found.size else 0  # a whole tensor has state of its own

    return gather_pieces(engine, engine.dtype, values)


def _gathered_tensors(engine: Engine, slot: str) -> Array:
    updater, world = _updater(engine), engine.grid.world
    held = [piece for piece in updater.state_pieces(slot) if engine.whole.writes(piece.spec)]
    mine = np.concatenate([np.empty(0, engine.dtype), *(updater.state_of(slot, piece) for piece in held)])
    names = world.allgather_object([piece.spec.name for piece in held], "whole tensors")
    entries = {entry.spec.name: entry for entry in slot_entries(engine, slot)}
    found = np.empty(sum(entry.spec.size for entry in entries.values()), engine.dtype)
    counts = [sum(entries[name].spec.size for name in of_rank) for of_rank in names]
    world.allgatherv(mine, found, counts, slot)
    whole, place = np.empty_like(found), 0
    for entry in (entries[name] for of_rank in names for name in of_rank):
        whole[entry.span.start : entry.span.stop] = found[place : place + entry.spec.size]
        place += entry.spec.size
    return whole


def _updater(engine: Engine) -> Updater:
    assert engine.updater is not None
    return engine.updater


def _gathered(engine: Engine, full: Array) -> Array:
    """Gather an array from the ranges that ranks own; return it in the order of the whole model. Collective.

    ``full`` has one element for each parameter element of this rank's data group. Only the ranges that this rank owns
    are valid before the call.
    """
    layout, data = engine.layout, engine.grid.data
    spans = [Share(layout, rank, data.size).spans for rank in range(data.size)]
    gather_spans(data, [full[s.start : s.stop] for s in spans[data.rank]], full, spans)
    return engine.whole.assemble(full)


def checked_state(engine: Engine, updater: Updater, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``state_dict()`` by what they are; LayoutError if the optimizer has others."""
    if absent := {"step_count", "state"}.difference(state):
        raise LayoutError(f"state has no {sorted(absent)}; pass what state_dict() has returned")
    slots, progress, method = state["state"], state.get("progress"), updater.method
    if set(slots) != set(updater.state):
        raise LayoutError(f"state has slots {sorted(slots)}, the optimizer's are {sorted(updater.state)}")
    sound = progress is None
    if method is not None:  # most optimizers have none
        from mpizero.optim.minimizers import is_progress

        sound = is_progress(progress)
    if not sound:
        raise LayoutError(f"progress is {progress!r:.60}, expected {method and 'that of state_dict()'}")
    found = {"the step count": int(state["step_count"]), "the progress": progress}
    for slot, arrays in sorted(slots.items()):
        for spec in (entry.spec for entry in slot_entries(engine, slot)):
            if spec.name not in arrays or np.shape(arrays[spec.name]) != spec.shape:
                raise LayoutError(f"state {slot!r} has no array {spec.name!r} of shape {spec.shape}")
            found[f"{slot!r} of parameter {spec.name!r}"] = arrays[spec.name]
    return found
