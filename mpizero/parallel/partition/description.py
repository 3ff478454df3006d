"""Describe a model by named parts, so that ranks can check that all of them were given the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero._util.fingerprint import LARGEST_ARRAY, Fingerprint, qualified_name
from mpizero.layout.flat import joined
from mpizero.types import ParameterSpec

#: Attributes of a model that ``describe_model`` lists under names of their own.
_APART = frozenset({".blocks", ".loss", ".parameters", ".start_values"})


def describe_model(model: Any, blocks: Mapping[str, tuple[ParameterSpec, ...]]) -> dict[str, Any]:
    """Return what makes up a model, by descriptive names, for a comparison between ranks. Not collective.

    First come the things that the user gave, such as the class, the layers, the loss and the seed; then those derived
    from them, such as the types and shapes of the parameters. ``blocks`` holds the parameters of every block.
    """
    described: dict[str, Any] = {"the class of the model": qualified_name(type(model))}
    fields = Fingerprint().parts(model).items
    described["the model"] = {step.removeprefix("."): item for step, item in fields.items() if step not in _APART}
    if hasattr(model, "blocks"):
        described["the names of the blocks"] = list(model.blocks)
        described |= {f"block {name!r}" if name else "the only block": one for name, one in model.blocks.items()}
        described["the order of layers"] = {name: _below(layer) for name, layer in model.blocks.items()}
        described |= {"the loss": model.loss, "the seed": model.seed}
    names = {joined(block, spec.name): spec for block, specs in blocks.items() for spec in specs}
    described["the parameter table"] = {"dtype": np.dtype(model.dtype), **names}
    described["the order of parameters"] = list(names)  # of a mapping made from a set it differs by process
    given = getattr(model, "start_values", None)
    if given is None:
        given = {} if hasattr(model, "blocks") else model.parameters
    described["the start values"] = {name: _in_pieces(values) for name, values in given.items()}
    return described


def _below(layer: Any) -> list[str]:
    """List the dotted names of all layers inside ``layer``, in their order; empty if there are none."""
    children = layer.children() if hasattr(layer, "children") else {}
    return [joined(name, inner) for name, child in children.items() for inner in ("", *_below(child))]


def _in_pieces(values: Any) -> Any:
    """Return ``values`` as an array, or as a list of flat pieces of it if it is too large to be compared at once."""
    array = np.asarray(values)
    pieces = array.nbytes // LARGEST_ARRAY + 1
    return array if pieces == 1 else np.array_split(array.reshape(-1), pieces)
