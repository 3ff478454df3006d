"""Read and check the attribute ``mpizero`` of a checkpoint, which holds all of a training's state but the arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpizero.checkpoint.format import is_count, is_number
from mpizero.errors import CheckpointError
from mpizero.parallel.checkpointing import tile_record
from mpizero.parallel.checkpointing.grain_record import EXPECTED, is_grain_record
from mpizero.parallel.checkpointing.restore import ArrayReader

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
    found: dict[str, Any] = dict.fromkeys(_SAVED) | {"step_number": 0} | saved
    for key, (sound, expected) in _SAVED.items():
        if not sound(found[key]):
            raise CheckpointError(f"{where}: {key} is {found[key]!r:.200}: expected {expected}")
    return found


def check_layout(layout: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    """Raise :class:`CheckpointError` if a checkpoint's layout ``saved`` is not ``layout``, that of the model."""
    if layout != {**dict.fromkeys(AXES, 1), **(saved or {})}:
        raise CheckpointError(
            f"strict_layout: the checkpoint was written by {_layout_text(saved)}, this model is "
            f"{_layout_text(layout)}; without strict_layout it can be loaded all the same"
        )


def _layout_text(layout: Mapping[str, Any] | None) -> str:
    if not layout:
        return "an unknown layout"
    ranks, nodes = (f"{layout[what]} {what[:-1]}{'s'[: layout[what] != 1]}" for what in ("ranks", "nodes"))
    split = ", ".join(f"{axis} {layout[axis]}" for axis in AXES if layout.get(axis, 1) != 1)
    return f"{layout['strategy']} over {ranks} on {nodes}{f' ({split})' if split else ''}"


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
        and {"strategy", "ranks", "nodes"} <= value.keys() <= {"strategy", "ranks", "nodes", *AXES}
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
    "grains": (is_grain_record, EXPECTED),
    "tiles": (tile_record.is_tile_record, tile_record.EXPECTED),
    "tied": (_is_tied, "null, or names of parameters, each with the name of the one whose values it shares"),
}
