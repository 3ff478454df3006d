"""Decide which settings a resumed run may change, if it is asked to by name (``--override``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mpizero._util.names import nearest
from mpizero.errors import ConfigError
from mpizero.train.config.sections import FREE_KEYS, FREE_SECTIONS, LENGTH
from mpizero.train.config.vector_sections import VECTOR_SECTIONS

#: Settings on which the meaning of what is saved depends: names, shapes, element types, samples consumed.
_FIXED = (
    "model.name",
    "model.make",
    "model.dtype",
    "model.freeze",
    "model.start",
    "model.start_include",
    "model.start_exclude",
    "model.start_rename",
    "optimizer.name",
    *(f"optimizer.{item.name}" for kind in VECTOR_SECTIONS.values() for item in fields(kind)),
    "train.global_batch",
    "train.micro_batch",
    "train.accumulate",
)


def overridable(key: str) -> bool:
    """Tell whether a resumed run may change a setting that determines the result. Not collective."""
    return not key.startswith("data.") and key not in _FIXED


def check_overridden(keys: Sequence[str], config: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings that a resumed run may change; ``config`` is the result of :meth:`Config.to_dict`.

    Not collective. The keys of ``--override`` may be changed, and with one of the schedule also the step at which it
    ends.

    Raises
    ------
    ConfigError
        If a key is unknown, may be changed without this option, or cannot be changed in a run at all.
    """
    known = [f"{section}.{name}" for section, values in config.items() for name in values]
    for key in keys:
        if key not in known:
            raise ConfigError(f"--override {key}: there is no such setting{nearest(key, known)}")
        if not overridable(key):
            raise ConfigError(
                f"--override {key}: cannot change in a run, because what is saved depends on it; start another run, "
                "from this one's parameters if you like: model.start"
            )
        if key in FREE_KEYS or key.partition(".")[0] in FREE_SECTIONS:
            raise ConfigError(f"--override {key}: a resumed run takes it without this option, from its file or --set")
    ends = [LENGTH] if any(key.startswith("optimizer.schedule") for key in keys) else []
    return (*keys, *ends)
