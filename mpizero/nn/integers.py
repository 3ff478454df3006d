"""List a model's arrays of whole numbers, such as counters of batches, and make their start values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpizero._util.checks import unmasked
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.flat import joined
from mpizero.types import INTEGER_DTYPES, Array, BlockModel, IntegerSpec

Integers = Mapping[str, tuple[IntegerSpec, ...]]


def integers_of(model: Any) -> dict[str, tuple[IntegerSpec, ...]]:
    """Return the integer arrays of a model by the name of the block, for blocks that have any. Not collective.

    :func:`layer_integers` says how blocks declare them. A black box has an attribute ``integers``, a mapping from names
    to arrays; each of these arrays counts as a block.

    Raises
    ------
    ConfigError
        If an array has another dtype than those in :data:`~mpizero.types.INTEGER_DTYPES`, or the name of a parameter.
    """
    found: dict[str, tuple[IntegerSpec, ...]] = {}
    if isinstance(model, BlockModel):
        for block, layer in model.blocks.items():
            if specs := layer_integers(layer):
                found[block] = specs
                taken = {spec.name for spec in layer.specs()}
                if twice := [spec.name for spec in specs if spec.name in taken]:
                    raise ConfigError(f"block {block!r} has {twice[0]!r} as a parameter and as an integer array")
    else:
        for name, array in getattr(model, "integers", {}).items():
            found[name] = (IntegerSpec("", np.shape(array), np.asarray(array).dtype.name),)
            if name in model.parameters:
                raise ConfigError(f"{name!r} is a parameter and an integer array: give one of them another name")
    for block, specs in found.items():
        for spec in specs:
            if spec.dtype not in INTEGER_DTYPES:
                name, known = joined(block, spec.name), ", ".join(INTEGER_DTYPES)
                raise ConfigError(f"integer array {name!r} has dtype {spec.dtype}: use {known}")
    return found


def layer_integers(layer: Any) -> tuple[IntegerSpec, ...]:
    """Return the integer arrays of a layer: its own first, then each child's, with the prefix ``<child>.``.

    A layer that defines a method ``integers()`` lists them itself. Not collective.
    """
    if (declared := getattr(layer, "integers", None)) is not None:
        return tuple(declared())
    own = layer.own_integers() if hasattr(layer, "own_integers") else ()
    children = layer.children().items() if hasattr(layer, "children") else ()
    nested = (replace(spec, name=f"{name}.{spec.name}") for name, child in children for spec in layer_integers(child))
    return (*own, *nested)


def fresh_integers(layer: Any) -> dict[str, Array]:
    """Return new arrays with the start values that a layer declares for its integer arrays, by local name.

    Not collective.
    """
    return {spec.name: np.full(spec.shape, spec.start, spec.dtype) for spec in layer_integers(layer)}


def start_integers(model: Any) -> dict[str, Array]:
    """Return new arrays with the start values of a model's integer arrays, by global name. Not collective.

    They are ``spec.start``, or what the model's attribute ``start_values`` (of a black box: ``integers``) has for them.

    Raises
    ------
    LayoutError
        If an array there has another shape, or values that the dtype cannot hold.
    """
    given = getattr(model, "start_values", None) or {}
    given = given if isinstance(model, BlockModel) else {**getattr(model, "integers", {}), **given}
    found = {}
    for block, specs in integers_of(model).items():
        for spec in specs:
            name = joined(block, spec.name)
            value = given[name] if name in given else np.full(spec.shape, spec.start, spec.dtype)
            found[name] = start_value(name, spec, value)
    return found


def start_value(name: str, spec: IntegerSpec, value: Any) -> Array:
    """Return a new integer array with the given value; ``name`` is its global name. Not collective.

    Raises
    ------
    LayoutError
        If ``value`` has another shape, or numbers that the dtype cannot hold.
    """
    given = np.asarray(unmasked(value, f"integer array {name!r}"))
    if given.shape == spec.shape and given.dtype.kind in "iubf":
        found: Array = given.astype(spec.dtype)
        if (found == given).all():
            return found
    raise LayoutError(
        f"integer array {name!r} is {spec.dtype} of shape {spec.shape}, it is given {given.dtype} of shape "
        f"{given.shape}{': it cannot hold these values' * (given.shape == spec.shape)}"
    )
