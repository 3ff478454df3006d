"""List the blocks of a model, from which pipeline stages and units are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.nn.layer import integers_of
from mpizero.parallel.partition.model_checks import check_model
from mpizero.types import BlackBoxModel, BlockModel, Init, ParameterSpec


def blocks_of(model: Any) -> dict[str, tuple[ParameterSpec, ...]]:
    """Return the parameter specs of a model, by the name of the block; in a black box each array counts as a block.

    Raises
    ------
    TypeError
        If ``model`` is neither a model of blocks nor a black box; the error names the attributes that either needs.
    """
    if isinstance(model, BlockModel):
        return {name: tuple(block.specs()) for name, block in model.blocks.items()}
    if not isinstance(model, BlackBoxModel):
        check_model(model)
    frozen, averaged = frozenset(getattr(model, "frozen", ())), frozenset(getattr(model, "averaged", ()))
    parameters = {
        name: (
            ParameterSpec(
                "",
                np.shape(a),
                Init(),
                np.ndim(a) > 1,
                name not in frozen,
                averaged=name in averaged,
                complex=np.iscomplexobj(a),
            ),
        )
        for name, a in model.parameters.items()
    }
    return parameters | {name: () for name in integers_of(model)}
