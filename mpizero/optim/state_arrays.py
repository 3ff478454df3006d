"""Tell which arrays of state an optimizer keeps for a parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpizero.errors import ConfigError
from mpizero.optim.adapted import optimizer_name, takes_whole
from mpizero.optim.averaging import EMA
from mpizero.types import ParameterSpec


def state_specs(optimizer: Any, spec: ParameterSpec) -> dict[str, ParameterSpec]:
    """Return the state arrays that belong to a parameter, by slot; each is described like a parameter of its name.

    ``optimizer`` is one that :func:`mpizero.optim.averaging.averaging` returned. A parameter that no optimizer trains
    has none.

    Raises
    ------
    ConfigError
        If an optimizer of whole tensors names an array that it has not declared.
    """
    if not spec.optimized:
        return {}
    if not takes_whole(optimizer, spec):
        return dict.fromkeys(optimizer.slots, spec)
    shapes = optimizer.state_shapes(spec.shape)
    if unknown := sorted(set(shapes) - set(optimizer.tensor_slots)):
        raise ConfigError(
            f"{optimizer_name(optimizer)}: state_shapes({spec.shape}) has {unknown[0]!r}, which tensor_slots = "
            f"{tuple(optimizer.tensor_slots)} lacks: name it there, too"
        )
    whole = {slot: replace(spec, shape=tuple(shape), part=None) for slot, shape in shapes.items()}
    return whole | ({EMA: spec} if EMA in optimizer.slots else {})


def state_size(optimizer: Any, spec: ParameterSpec) -> int:
    """Return the number of elements of all state arrays that belong to a parameter."""
    return sum(found.size for found in state_specs(optimizer, spec).values())


def tensor_state_size(optimizer: Any, spec: ParameterSpec) -> int:
    """Return the number of elements of the state that the owner of a whole tensor keeps: without an average."""
    return sum(found.size for slot, found in state_specs(optimizer, spec).items() if slot not in optimizer.slots)
