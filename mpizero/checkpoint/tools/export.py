"""Write arrays of a checkpoint into a file of another format; only a few blocks are in memory at a time."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from mpizero.checkpoint.format.table import check_paths
from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.tools import hdf5, npz, tensorfile
from mpizero.checkpoint.tools.elements import (
    AVERAGES,
    BFLOAT16,
    FLOATING,
    PARAMETERS,
    Report,
    as_wanted,
    blocks,
    convert,
    element_types,
    matches,
    nbytes_of,
    overflows,
    short_name,
    stored_type,
)
from mpizero.checkpoint.tools.output import new_file
from mpizero.errors import CheckpointError, ConfigError
from mpizero.types import Array


@dataclass(frozen=True)
class ExportedArray:
    """Describe one array of an export.

    Attributes
    ----------
    path, name : str
        Name of the array in the checkpoint and in the new file.
    shape : tuple of int
        Shape of the array.
    source, element : str
        Name of the element type in the checkpoint and in the new file: NumPy's name, or ``bfloat16``.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    source: str
    element: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type in which the elements are stored in the new file."""
        return stored_type(self.element)

    @property
    def nbytes(self) -> int:
        """Size of the array in the new file in bytes."""
        return prod(self.shape) * self.dtype.itemsize


#: Type of a function that yields the converted values of an array as 1-D pieces in order.
Values = Callable[[ExportedArray], Iterator[Array]]


class ExportWriter(Protocol):
    """Define the signature of the functions that write arrays into a new file at ``path``."""

    def __call__(
        self, path: str, items: Sequence[ExportedArray], values: Values, attributes: Mapping[str, Any]
    ) -> None:
        """Write the arrays ``items``, whose values ``values(item)`` yields, and the attributes of the checkpoint."""


#: The function that writes each format, and whether the format has bfloat16.
FORMATS: dict[str, tuple[ExportWriter, bool]] = {
    "safetensors": (tensorfile.write, True),
    "npz": (npz.write, False),
    "hdf5": (hdf5.write, False),
}


def export(
    reader: Reader,
    out: str | os.PathLike[str],
    format: str,
    *,
    state: bool = False,
    ema: bool = False,
    dtype: str | None = None,
    pattern: str | None = None,
    tied: bool = False,
    replace: bool = False,
    report: Report | None = None,
) -> list[ExportedArray]:
    """Write arrays of an open checkpoint into one new file; return the descriptions of the written arrays.

    Not collective: one process opens the checkpoint. Values are verified before they are written. Only a few blocks are
    in memory at a time. The array ``parameters/<name>`` is called ``<name>`` in the
    file; other arrays keep their names.

    Parameters
    ----------
    reader : Reader
        The checkpoint.
    out : path
        Path of the new file. The file appears there only when it is complete.
    format : {"safetensors", "npz", "hdf5"}
        Format of the new file. For "npz" and "hdf5" bfloat16 values are converted to float32, which is exact.
    state : bool
        Whether to export the state arrays of the optimizer, too.
    ema : bool
        Whether to export the moving average of the parameters under their names. Parameters that no optimizer trains
        have none, and are exported themselves.
    dtype : str, optional
        Type of floating-point arrays: ``bfloat16``, ``float16``, or, also of complex parts, ``float32`` or ``float64``.
    pattern : str, optional
        Export only arrays whose names match this shell pattern.
    tied : bool
        Whether to write tied parameters under their other names, too, as PyTorch's ``state_dict()`` has them.
    replace : bool
        Whether an existing file may be replaced.
    report : callable, optional
        Called with the number of bytes, in the checkpoint, of each block after the block has been written.

    Raises
    ------
    ConfigError
        If no array is chosen, the format lacks an element type, values are too large for ``dtype``, or the file exists.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    write, knows_bfloat16 = FORMATS[format]
    items = chosen(reader, state=state, ema=ema, dtype=dtype, pattern=pattern, knows_bfloat16=knows_bfloat16)
    if format == "safetensors":
        tensorfile.library()
    if tied:
        items += _tied(reader, items)
    with new_file(out, replace) as temporary:
        write(temporary, items, lambda item: _converted(reader, item, report), reader.attributes)
    return items


def _converted(reader: Reader, item: ExportedArray, report: Report | None) -> Iterator[Array]:
    """Yield the values of an array block by block, converted to the element type that they will have."""
    for _, part in blocks(reader, item.path, report):
        converted = convert(part, item.source, item.element)
        if lost := overflows(part, item.source, converted, item.element):
            raise ConfigError(
                f"array {item.path!r}: {lost} values are too large for {item.element}; choose another type"
            )
        yield converted


def chosen(
    reader: Reader,
    *,
    state: bool,
    dtype: str | None,
    pattern: str | None,
    ema: bool = False,
    knows_bfloat16: bool = True,
) -> list[ExportedArray]:
    """Return the descriptions of the arrays that :func:`export` with the same arguments writes.

    ``knows_bfloat16`` says whether the format has bfloat16; otherwise such arrays become float32.
    """
    if dtype is not None and dtype not in FLOATING:
        raise ConfigError(f"type {dtype!r}: must be one of {', '.join(FLOATING)}")
    if dtype == BFLOAT16 and not knows_bfloat16:
        raise ConfigError("type 'bfloat16': only safetensors files know it; choose that format, or float32")
    items, averages = [], averages_of(reader) if ema else {}
    for path, source in element_types(reader).items():
        if matches(path, pattern) and (state or path.startswith(PARAMETERS)):
            element = as_wanted(source, dtype)
            element = "float32" if element == BFLOAT16 and not knows_bfloat16 else element
            shape, read = reader.arrays[path][0], averages.get(path, path)
            items.append(ExportedArray(read, short_name(path), shape, source, element))
    if not items:
        which = "arrays" if state else "parameters"
        raise ConfigError(f"checkpoint {reader.name}: none of its {which} fits the pattern {pattern!r}")
    twice = [name for name, count in Counter(item.name for item in items).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]!r} would be the name of two arrays; export the parameters only")
    check_paths(item.name for item in items)
    return items


def averages_of(reader: Reader) -> dict[str, str]:
    """Return the path of each parameter's moving average, by the parameter's path.

    Raises
    ------
    ConfigError
        If the checkpoint has no average of its parameters, or no step was made yet.
    """
    found = {PARAMETERS + path.removeprefix(AVERAGES): path for path in reader.arrays if path.startswith(AVERAGES)}
    if not found:
        raise ConfigError(f"checkpoint {reader.name} holds no average of the parameters: it was trained without ema")
    optimizer = reader.attributes.get("mpizero", {}).get("optimizer") or {}
    if not optimizer.get("step_count"):
        raise ConfigError(f"checkpoint {reader.name} is of no step yet: the average is the parameters; export these")
    return found


def _tied(reader: Reader, items: Sequence[ExportedArray]) -> list[ExportedArray]:
    """Return descriptions of the tied parameters among ``items`` under their other names."""
    by_name = {item.name: item for item in items}
    uses = reader.attributes.get("mpizero", {}).get("tied", {}).items()
    found = [(by_name.get(home), use) for use, home in uses]
    return [dataclasses.replace(item, name=use) for item, use in found if item is not None]


def export_bytes(reader: Reader, *, state: bool = False, pattern: str | None = None) -> int:
    """Return the number of bytes that :func:`export` with the same arguments reads from the checkpoint."""
    return sum(nbytes_of(reader, item.path) for item in chosen(reader, state=state, dtype=None, pattern=pattern))
