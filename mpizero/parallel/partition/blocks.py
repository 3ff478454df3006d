"""Return the blocks of a model: the pieces that pipeline stages and units are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.parallel.partition.model_checks import check_model
from mpizero.types import BlackBoxModel, BlockModel, Init, ParameterSpec


def blocks_of(model: Any) -> dict[str, tuple[ParameterSpec, ...]]:
    """Return the parameter specs of a model, by block; each parameter of a black box is a block of its own.

    Raises
    ------
    TypeError
        If ``model`` is neither a block model nor a black box, naming what it lacks.
    """
    if isinstance(model, BlockModel):
        return {name: tuple(block.specs()) for name, block in model.blocks.items()}
    if not isinstance(model, BlackBoxModel):
        check_model(model)
    frozen = frozenset(getattr(model, "frozen", ()))
    return {
        name: (ParameterSpec("", np.shape(a), Init(), np.ndim(a) > 1, name not in frozen),)
        for name, a in model.parameters.items()
    }
