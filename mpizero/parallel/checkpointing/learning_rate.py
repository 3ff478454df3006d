"""Compare the learning rate in a checkpoint with the rate of the bound optimizer, to warn if loading changes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mpizero import optim
from mpizero.errors import CheckpointError
from mpizero.optim.elementwise import learning_rate
from mpizero.parallel.optimizer.sharded_update import Updater

#: Name of the checkpoint attribute that holds the learning rate.
ATTRIBUTE = "learning_rate"


def recorded(updater: Updater | None) -> dict[str, Any]:
    """Return the checkpoint attribute :data:`ATTRIBUTE`, a dict with the keys ``last`` and ``schedule``.

    Not collective. ``last`` is the learning rate of the last step, None if unknown. ``schedule`` holds the settings of
    the optimizer's learning-rate schedule if it is one of the library's, else it is None.
    """
    last = None if updater is None else updater.last_rate
    schedule = _schedule(updater)
    return {"last": last if last is not None and math.isfinite(last) else None, "schedule": schedule}


def moved(updater: Updater, attributes: Mapping[str, Any], steps: int) -> str | None:
    """Describe how the bound optimizer's schedule or learning rate differs from the checkpoint's.

    Return None if they are equal, or if one of them is unknown. Not collective.

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
        If the attribute :data:`ATTRIBUTE` does not have the form that :func:`recorded` returns.
    """
    saved, last = attributes.get(ATTRIBUTE), last_of(attributes)
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


def last_of(attributes: Mapping[str, Any]) -> float | None:
    """Return the learning rate of the last step before a checkpoint was saved; None if unknown.

    ``attributes`` are all attributes of the checkpoint, by name. Not collective.

    Raises
    ------
    CheckpointError
        If the attribute :data:`ATTRIBUTE` does not have the form that :func:`recorded` returns.
    """
    saved = attributes.get(ATTRIBUTE)
    if saved is None:
        return None
    last = saved.get("last") if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or not (last is None or (isinstance(last, float) and math.isfinite(last))):
        raise CheckpointError(f"the checkpoint's attribute {ATTRIBUTE!r} cannot be what mpizero wrote: {saved!r:.200}")
    return last


def _schedule(updater: Updater | None) -> dict[str, Any] | None:
    lr = None if updater is None else getattr(updater.optimizer, "lr", None)
    return None if not isinstance(lr, optim.Schedule) else asdict(lr) | {"lr": float(lr.lr), "end": float(lr.end)}
