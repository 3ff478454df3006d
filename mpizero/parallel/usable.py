"""Whether a user's own model can be trained: what it lacks is said where it is given, not where it is missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero.errors import ArgumentError, ConfigError
from mpizero.types import BlackBoxModel, BlockModel

_LAYER = ("specs", "forward", "backward")


def check_model(model: Any) -> None:
    """Raise unless ``model`` is a model of blocks or a black box, each part of the kind that it must be.

    Not collective.

    Raises
    ------
    TypeError
        Naming the part, what it is and what it must be.
    ConfigError
        A type of parameters, or a seed, that cannot be used.
    """
    name = type(model).__name__
    if isinstance(model, type):
        raise ArgumentError(f"{model.__name__} is a class, not a model: call it to make one")
    if isinstance(model, BlockModel):
        if not isinstance(model.blocks, Mapping) or not model.blocks:
            raise ArgumentError(
                f"{name}.blocks must be layers by name, {{'encoder': layer}}, at least one; got {model.blocks!r:.60}"
            )
        for block, layer in model.blocks.items():
            _check_part(f"block {block!r} of {name}", "a layer", layer, _LAYER)
        _check_part(f"the loss of {name}", "a loss", model.loss, ("forward", "backward"))
        if isinstance(model.seed, bool) or not isinstance(model.seed, int | np.integer) or model.seed < 0:
            raise ConfigError(f"{name}.seed={model.seed!r}: expected a whole number >= 0")
    elif not isinstance(model, BlackBoxModel):
        raise ArgumentError(
            f"{name} is not a model: it needs 'blocks', 'loss', 'dtype' and 'seed' (a sequence of layers), or "
            "'parameters' and 'loss_and_grad' (a function; wrap it in mpizero.FunctionModel)"
        )
    dtype = getattr(model, "dtype", None)
    try:
        known = np.dtype(dtype) in (np.float32, np.float64)
    except TypeError:  # NumPy's answer to names that it does not know
        known = False
    if not known or dtype is None:
        raise ConfigError(f"parameters of type {dtype!r} are not supported ({name}.dtype): use float32 or float64")


def _check_part(what: str, kind: str, part: Any, methods: tuple[str, ...]) -> None:
    if isinstance(part, type):
        raise ArgumentError(f"{what} is the class {part.__name__}, not {kind}: call it to make one")
    if lacking := [method for method in methods if not callable(getattr(part, method, None))]:
        raise ArgumentError(f"{what} is {part!r:.80}, not {kind}: it has no method {', '.join(lacking)}")
