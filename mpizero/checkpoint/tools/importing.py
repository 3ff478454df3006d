"""Make checkpoints from files of tensors that other programs have written."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpizero._util.names import fits
from mpizero.checkpoint.format.table import LocalArray, check_path
from mpizero.checkpoint.tools.elements import (
    BFLOAT16,
    FLOATING,
    OPTIMIZER,
    PARAMETERS,
    as_wanted,
    convert,
    matches,
    overflows,
    short_name,
    stored_type,
)
from mpizero.checkpoint.tools.output import check_free
from mpizero.checkpoint.tools.tensorfile import Tensor, TensorFile
from mpizero.checkpoint.writer import write
from mpizero.errors import CheckpointError, ConfigError
from mpizero.types import Array

#: Type of the expected arrays: shape and element type by path.
Expected = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class ImportRules:
    """Describe how tensors of a file become arrays of a checkpoint.

    Attributes
    ----------
    names : sequence of (str, str)
        Pairs of a tensor's name in the file and its name in the checkpoint. Both may contain one ``*``, which stands
        for the same text in both. The first pair that matches a tensor is used.
    drop : sequence of str
        Shell patterns of the names, in the file, of tensors that are left out.
    transpose : sequence of str
        Shell patterns of the names, in the checkpoint, of arrays whose axes are reversed.
    dtype : str or None
        Type to which floating-point tensors are converted; None keeps their types.
    """

    names: Sequence[tuple[str, str]] = ()
    drop: Sequence[str] = ()
    transpose: Sequence[str] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for an unknown type or a malformed pair of names."""
        if self.dtype is not None and self.dtype not in FLOATING:
            raise ConfigError(f"type {self.dtype!r}: must be one of {', '.join(FLOATING)}")
        for old, new in self.names:
            if not old or not new or old.count("*") > 1 or old.count("*") != new.count("*"):
                raise ConfigError(f"map {old}={new}: must be OLD=NEW, with one * in both or none")

    def path(self, name: str) -> str:
        """Return the path that the tensor ``name`` of the file gets in the checkpoint. Not collective."""
        for old, new in self.names:
            if found := _wanted(old, name):
                name = new.replace("*", found[1]) if "*" in new else new
                break
        return name if name.startswith((PARAMETERS, OPTIMIZER)) else PARAMETERS + name


def _wanted(old: str, name: str) -> re.Match[str] | None:
    """Match a tensor's name against ``old``, the first name of a pair; group 1 is the text that ``*`` stands for."""
    return re.fullmatch(re.escape(old).replace(r"\*", "(.*)"), name)


def write_imported(
    source: TensorFile,
    out: str | os.PathLike[str],
    attributes: Mapping[str, Any],
    rules: ImportRules,
    *,
    expected: Expected | None = None,
    replace: bool = False,
) -> list[str]:
    """Write the tensors of a file as a checkpoint; return the paths of its arrays.

    Not collective: one process calls this function. Only values that are converted or transposed are copied into
    memory; other values are read when they are written.

    Parameters
    ----------
    source : TensorFile
        The file of tensors.
    out : path
        Folder of the new checkpoint.
    attributes : dict
        Attributes of the new checkpoint. :func:`adapt_attributes` adapts them to the arrays.
    rules : ImportRules
        Names and conversions.
    expected : mapping, optional
        Shape and element type of the model's arrays, by path. The file must then contain exactly the parameters of the
        model, and all optimizer state arrays or none of them.
    replace : bool
        Whether an existing checkpoint may be replaced.

    Raises
    ------
    CheckpointError
        If the tensors are not the arrays of the model, or cannot be stored in a checkpoint.
    ConfigError
        If a rule matches no tensor, values are too large for a type, or ``out`` exists and may not be replaced.
    """
    check_free(os.fspath(out), replace)
    found: dict[str, Tensor] = {}
    for name in sorted(source.tensors):
        if any(fits(name, pattern) for pattern in rules.drop):
            continue
        path = check_path(rules.path(name))
        if path in found:
            raise CheckpointError(f"{source.path}: tensors {found[path].name!r} and {name!r} both become {path!r}")
        found[path] = source.tensors[name]
    _check_rules(source, rules, found)
    shapes = {path: _become(source, tensor, path, rules) for path, tensor in found.items()}
    if expected is not None:
        _check(source.path, shapes, expected)
    arrays = [
        LocalArray(path, shape, stored_type(element), ((0, _values(source, found[path], path, rules, element)),))
        for path, (shape, element) in shapes.items()
    ]
    write(out, arrays, adapt_attributes(attributes, shapes), replace=replace)
    return list(shapes)


def adapt_attributes(
    attributes: Mapping[str, Any], arrays: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, Any]:
    """Return a copy of a checkpoint's attributes, adapted to its arrays. Not collective.

    ``arrays`` holds shape and element type of the arrays by path. If there are no optimizer state arrays, the attribute
    ``mpizero.optimizer`` is set to None. The list of bfloat16 arrays is computed from ``arrays``.
    """
    adapted = copy.deepcopy(dict(attributes))
    own = adapted.get("mpizero")
    if isinstance(own, dict) and not any(path.startswith(OPTIMIZER) for path in arrays):
        own["optimizer"] = None
    adapted.pop(BFLOAT16, None)
    if tagged := [path for path, (_, element) in arrays.items() if element == BFLOAT16]:
        adapted[BFLOAT16] = tagged
    return adapted


def _check_rules(source: TensorFile, rules: ImportRules, found: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` if a rule matches no tensor, because the rule is then probably misspelt."""
    for old, _ in rules.names:
        if not any(_wanted(old, name) for name in source.tensors):
            raise ConfigError(f"map {old}: no tensor of {source.path} has such a name")
    for pattern in rules.transpose:
        if not any(matches(path, pattern) for path in found):
            raise ConfigError(f"transpose {pattern}: no array has such a name")


def _become(source: TensorFile, tensor: Tensor, path: str, rules: ImportRules) -> tuple[tuple[int, ...], str]:
    """Return the shape and the element type that a tensor will have in the checkpoint, as the array ``path``."""
    if tensor.element is None:
        raise CheckpointError(
            f"{source.path}: tensor {tensor.name!r} has elements of type {tensor.code}, which a checkpoint cannot "
            "hold; it can be left out (--drop)"
        )
    turned = any(matches(path, pattern) for pattern in rules.transpose)
    element = as_wanted(tensor.element, rules.dtype)
    return (tensor.shape[::-1] if turned else tensor.shape), element


def _values(source: TensorFile, tensor: Tensor, path: str, rules: ImportRules, element: str) -> Array:
    values = source.values(tensor.name)
    assert tensor.element is not None
    if element == tensor.element:
        converted = values
    else:
        converted = convert(np.require(values, requirements=["C", "A"]), tensor.element, element)
    if lost := overflows(values, tensor.element, converted, element):
        raise ConfigError(f"{source.path}: tensor {tensor.name!r}: {lost} values are too large for {element}")
    if any(matches(path, pattern) for pattern in rules.transpose):
        converted = np.ascontiguousarray(converted.reshape(tensor.shape).T).reshape(prod(tensor.shape))
    return converted


def _check(name: str, found: Expected, expected: Expected) -> None:
    with_state = any(path.startswith(OPTIMIZER) for path in found)
    wanted = {path: value for path, value in expected.items() if with_state or not path.startswith(OPTIMIZER)}
    problems = []
    if missing := [short_name(path) for path in wanted if path not in found]:
        problems.append(f"missing: {_some(missing)}; another name of it can be mapped (--map OLD=NEW)")
    if extra := [short_name(path) for path in found if path not in wanted]:
        problems.append(f"unexpected: {_some(extra)}; what is not wanted can be left out (--drop)")
    for path, (shape, element) in wanted.items():
        if path in found and found[path] != (shape, element):
            has, hint = found[path], ""
            if has[0] == shape:
                hint = f" (--dtype {element} converts)" if has[1] in FLOATING and element in FLOATING else ""
            elif has[0] == shape[::-1]:
                hint = f" (--transpose {short_name(path)} turns it)"
            problems.append(f"{short_name(path)} is {has[1]} {list(has[0])}, expected {element} {list(shape)}{hint}")
    if problems:
        raise CheckpointError(f"{name} holds another model: {'; '.join(problems[:4])}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
