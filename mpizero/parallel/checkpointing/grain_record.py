"""Record in checkpoints how global batches are cut into grains, so that a resumed training goes on in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mpizero._util.text import notice
from mpizero.checkpoint.format import is_count
from mpizero.errors import CheckpointError
from mpizero.layout.batch import GrainRule
from mpizero.layout.sum_tree import ORDER

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine

#: What errors say is expected of the record.
EXPECTED = (
    "null, or order (text), micro_batch and efficient (null or whole number >= 1), accumulate (the same, no null) and "
    "coarse (true or false)"
)
#: What a checkpoint without a record means: the default of the versions that wrote none.
_BEFORE = {"micro_batch": None, "efficient": None, "coarse": False}
_NUMBERS = ("micro_batch", "efficient")


def grain_record(rule: GrainRule) -> dict[str, Any]:
    """Return the record of a rule, as plain JSON values."""
    return {"order": ORDER, **asdict(rule)}


def is_grain_record(value: object) -> bool:
    """Tell whether ``value``, any JSON value from a checkpoint, is a record of a rule or None."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() | {"coarse"} == {"order", "micro_batch", "accumulate", "efficient", "coarse"}
        and isinstance(value.get("coarse", False), bool)  # older versions wrote none
        and isinstance(value["order"], str)
        and is_count(value["accumulate"], 1)
        and all(value[name] is None or is_count(value[name], 1) for name in _NUMBERS)
    )


def check_order(record: Mapping[str, Any] | None) -> None:
    """Raise :class:`CheckpointError` if gradients were added in an order that this version does not know."""
    if record is not None and record["order"] != ORDER:
        raise CheckpointError(
            f"the checkpoint's training added the gradients of grains in the order {record['order']!r:.80}, which this "
            f"version does not know; it knows {ORDER!r}: go on with the version that wrote the checkpoint, or load it "
            "into a model without an optimizer to take the parameters alone"
        )


def resume_grains(engine: Engine, record: Mapping[str, Any] | None) -> None:
    """Cut global batches from now on as the training did that wrote the checkpoint.

    Not collective; every rank calls it. A ``micro_batch`` that the user has set stays. Rank 0 prints a notice if it, or
    ``accumulate``, differs from the record, and if a recorded ``micro_batch`` is taken.
    """
    config, own = engine.config, engine.config.grain_rule(engine.model)
    found = _BEFORE if record is None else {name: record.get(name, before) for name, before in _BEFORE.items()}
    engine.grain_rule = own if config.micro_batch is not None else replace(own, **found)
    if record is None or not engine.prints_notices:
        return
    theirs = _said(record["micro_batch"], record["accumulate"])
    if config.accumulate != record["accumulate"] or config.micro_batch not in (None, record["micro_batch"]):
        ours = _said(engine.grain_rule.micro_batch, config.accumulate)
        unsure = record["micro_batch"] is None and config.accumulate == record["accumulate"]
        notice(
            f"the checkpoint was trained with {theirs}, this training goes on with {ours}: "
            f"{'where these are not the same number of samples, ' if unsure else ''}"
            "not with the bits of a run that was never interrupted"
        )
    elif config.micro_batch is None and record["micro_batch"] is not None:
        notice(f"training goes on with {theirs}, as the checkpoint says; set micro_batch to change it")


def _said(micro_batch: int | None, accumulate: int) -> str:
    text = "the default micro_batch" if micro_batch is None else f"micro_batch={micro_batch}"
    return text + (f" and accumulate={accumulate}" if accumulate > 1 else "")
