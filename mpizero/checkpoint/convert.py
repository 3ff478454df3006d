"""Convert checkpoints to and from safetensors, ``.npz`` and plain HDF5 files, a few blocks in memory at a time.

:func:`export` writes arrays of a checkpoint into one new file, :func:`write_imported` makes a checkpoint from a file
that another program has written, and :func:`open_parameters` reads ranges of parameters of any floating-point type from
a file of any of these kinds. A new file appears only when it is complete (:func:`new_file`).

[Note: which part the library does] The library ``safetensors`` reads and checks headers before memory for tensors is
allocated. It refuses a header that is too large, and tensors that overlap, leave gaps or do not fit their bytes. It
cannot write a file without holding all tensors in memory, and cannot read bfloat16 with NumPy. Therefore this module
reads and writes the values itself, block by block. A new file gets its final name only after the library was able to
read it.

As when checkpoints are written, libhdf5 builds the structure of an HDF5 file in memory and never writes to the disk,
because it crashes if the disk is full.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero._util.names import fits
from mpizero._util.text import list_few
from mpizero.checkpoint import npz
from mpizero.checkpoint.atomic_folder import TEMPORARY, as_bytes, fill_file, opened, sync_folder, write_at
from mpizero.checkpoint.format import (
    OPTIMIZER,
    PARAMETERS,
    LocalArray,
    build,
    canonical_json,
    check_path,
    check_paths,
    open_regular,
    parse,
    short_name,
)
from mpizero.checkpoint.inspect import (
    AVERAGES,
    BFLOAT16,
    FLOATING,
    Report,
    as_wanted,
    blocks,
    convert,
    element_types,
    find_checkpoint,
    matches,
    nbytes_of,
    overflows,
    stored_type,
)
from mpizero.checkpoint.npz import NpzFile
from mpizero.checkpoint.reader import Reader, open_checkpoint
from mpizero.checkpoint.writer import write
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError, CheckpointMissingError, ConfigError, MpizeroError
from mpizero.types import Array

#: Key in a file's metadata whose value is the attributes of the exported checkpoint.
METADATA = "mpizero"
#: The format's names of element types, in the order in which the library writes them.
_TYPES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": BFLOAT16,
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}


def library() -> Any:
    """Import and return the library ``safetensors``.

    Raises
    ------
    ConfigError
        If the library is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise ConfigError(
            "safetensors files need the package safetensors, which is not installed: pip install 'mpizero[safetensors]'"
        ) from None
    return safetensors


@dataclass(frozen=True)
class Tensor:
    """Describe one tensor of a safetensors file.

    ``code`` is the type code of the format, such as "BF16"; ``start`` is the index of the first byte in the file.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def element(self) -> str | None:
        """Name of the element type (NumPy's name, or ``bfloat16``); None if a checkpoint cannot store it."""
        return _TYPES.get(self.code)


class TensorFile(AbstractContextManager["TensorFile"]):
    """Read tensors of a memory-mapped safetensors file; its header is checked before any tensor is read.

    Parameters
    ----------
    path : path
        Path of a regular file, or of a link to one.

    Attributes
    ----------
    tensors : dict
        Description (:class:`Tensor`) of each tensor, by name.
    attributes : dict
        Attributes of the checkpoint from which :func:`~mpizero.checkpoint.convert.export` made the file; empty for
        files of other programs.

    Raises
    ------
    CheckpointError
        If the file is not a safetensors file, or is damaged or crafted.
    ConfigError
        If the library is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.tensors, metadata = _read_header(self.path)
        self.attributes = _attributes_in(metadata)
        self._bytes: Array | None = np.asarray(np.memmap(self.path, np.uint8, "r")) if self.tensors else None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bytes = None

    def values(self, name: str) -> Array:
        """Return a 1-D view of a tensor's values, bfloat16 as uint16; the file is read when the values are used."""
        tensor = self.tensors[name]
        assert self._bytes is not None
        assert tensor.element is not None
        return self._bytes[tensor.start : tensor.start + tensor.nbytes].view(stored_type(tensor.element))


def _read_header(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    safetensors = library()
    header, size = _header_bytes(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            described = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        entries, tensors = json.loads(header), {}
        for name, (code, shape) in described.items():
            begin, stop = map(int, entries[name]["data_offsets"])
            tensors[name] = Tensor(name, code, shape, 8 + len(header) + begin, stop - begin)
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a sound safetensors file: {error}") from None
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        known = tensor.element and prod(tensor.shape) * stored_type(tensor.element).itemsize
        if tensor.start != 8 + len(header) + end or (known is not None and known != tensor.nbytes):
            raise CheckpointError(f"{path}: tensor {tensor.name!r} does not lie where its header says")
        end += tensor.nbytes
    if 8 + len(header) + end != size:
        raise CheckpointError(f"{path}: {size} bytes instead of the {8 + len(header) + end} that its header tells")
    return tensors, metadata


#: The largest header, in bytes, that is read.
HEADER_LIMIT = 16 * 1024 * 1024


def _header_bytes(path: str) -> tuple[bytes, int]:
    """Return the bytes of the header, and the size of the file in bytes."""
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such file")
    with os.fdopen(open_regular(os.path.realpath(path)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path}: not a safetensors file, or truncated: {size} bytes")
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{path}: a header of {length} bytes, at most {HEADER_LIMIT} are read")
        return file.read(length), size


def _attributes_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        attributes = parse(metadata.get(METADATA, "{}").encode())
    except ValueError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


_RANK = {element: number for number, element in enumerate(_TYPES.values())}
_CODE = {element: code for code, element in _TYPES.items()}


def write_tensorfile(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write arrays, and the attributes as metadata; the new file has the bytes that ``safetensors`` would write.

    ``items`` describes the arrays (:class:`ExportedArray`); ``values(item)`` yields the values of one, piece by piece.
    """
    entries: dict[str, Any] = {"__metadata__": {METADATA: canonical_json(dict(attributes), "attributes")}}
    if any(item.name in entries for item in items):
        raise ConfigError(
            "array '__metadata__': a safetensors file keeps its metadata under this name, so no array can have it; "
            "choose the format npz or hdf5, or leave the array out (--pattern)"
        )
    if unknown := [item for item in items if item.element not in _CODE]:
        raise ConfigError(
            f"array {unknown[0].path!r} is {unknown[0].element}, which safetensors files cannot hold: convert it "
            "(--dtype float32 makes complex64 of it), or choose the format npz or hdf5"
        )
    ordered, end = sorted(items, key=lambda item: (_RANK[item.element], item.name)), 0
    for item in ordered:
        offsets = [end, end := end + item.nbytes]
        entries[item.name] = {"dtype": _CODE[item.element], "shape": list(item.shape), "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # so that every tensor is aligned to its elements
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for item in ordered:
            for part in values(item):
                file.write(as_bytes(part))
    with TensorFile(path) as written:
        expected = {item.name: (item.element, item.shape) for item in items}
        if {tensor.name: (tensor.element, tensor.shape) for tensor in written.tensors.values()} != expected:
            raise CheckpointError(f"{path}: does not hold what was written")


def write_hdf5(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write each array as a contiguous dataset, and the attributes as JSON text in an attribute of the root group.

    ``items`` and ``values`` are as for :func:`write_tensorfile`.
    """
    root_attributes = {"attributes": np.bytes_(canonical_json(dict(attributes), "attributes").encode())}
    skeleton = build({item.name: (item.shape, item.dtype) for item in items}, root_attributes=root_attributes)
    fill_file(path, skeleton)
    with opened(path, os.O_WRONLY) as file:
        for item in items:
            offset = skeleton.offsets[item.name]
            for part in values(item):
                write_at(file, as_bytes(part), offset, path)
                offset += part.nbytes


@contextmanager
def new_file(path: str | os.PathLike[str], replace: bool) -> Iterator[str]:
    """Yield a temporary path beside ``path``; at the end sync the file there to disk and rename it to ``path``.

    The ``with`` block must write a file at the temporary path. If the block raises, the temporary file is removed.

    Raises
    ------
    ConfigError
        If ``path`` exists and ``replace`` is False, or if ``path`` is a folder.
    """
    target = os.path.abspath(os.fspath(path))
    if os.path.isdir(target):
        raise ConfigError(f"{target}: is a folder; give the name of a file")
    parent, name = os.path.split(target)
    check_free(target, replace)
    temporary = os.path.join(parent, f"{TEMPORARY}{name}.{socket.gethostname()}.{os.getpid()}")
    try:
        yield temporary
        with opened(temporary, os.O_RDONLY) as file:
            os.fsync(file)
        check_free(target, replace)
        os.rename(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and not isinstance(error, MpizeroError) and error.filename is None:
            error.filename = target  # a full disk does not say of which file
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(parent)


def check_free(target: str, replace: bool) -> None:
    """Raise :class:`ConfigError` if ``target`` exists and ``replace`` is False."""
    if os.path.lexists(target) and not replace:
        raise ConfigError(f"{target}: exists; choose another name, or --force to replace it")


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


#: Type of a function that writes arrays, whose values the third argument yields, and attributes into a new file.
ExportWriter = Callable[[str, Sequence[ExportedArray], Values, Mapping[str, Any]], None]

#: The function that writes each format, and whether the format has bfloat16.
FORMATS: dict[str, tuple[ExportWriter, bool]] = {
    "safetensors": (write_tensorfile, True),
    "npz": (npz.write, False),
    "hdf5": (write_hdf5, False),
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
    in memory at a time. The array ``parameters/<name>`` is called ``<name>`` in the file; other arrays keep their
    names.

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
        have no moving average; their own values are exported.
    dtype : str, optional
        Type to which floating-point arrays are converted: ``bfloat16``, ``float16``, ``float32`` or ``float64``. The
        last two also convert the parts of complex numbers; with the first two, complex arrays are an error.
    pattern : str, optional
        Export only arrays whose names match this shell pattern.
    tied : bool
        Whether to write tied parameters under their other names, too, as PyTorch's ``state_dict()`` has them.
    replace : bool
        Whether an existing file may be replaced.
    report : callable, optional
        Called after each block has been written, with the number of bytes that the block takes in the checkpoint.

    Raises
    ------
    ConfigError
        If no array is to be exported, the format lacks an element type, values are too large for ``dtype``, or the file
        exists.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    write, knows_bfloat16 = FORMATS[format]
    items = chosen(reader, state=state, ema=ema, dtype=dtype, pattern=pattern, knows_bfloat16=knows_bfloat16)
    if format == "safetensors":
        library()
    if tied:
        items += _tied(reader, items)
    with new_file(out, replace) as temporary:
        write(temporary, items, lambda item: _converted_blocks(reader, item, report), reader.attributes)
    return items


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

    ``knows_bfloat16`` says whether the format has bfloat16; if not, bfloat16 arrays become float32.
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


def _converted_blocks(reader: Reader, item: ExportedArray, report: Report | None) -> Iterator[Array]:
    """Yield the values of an array block by block, converted to the element type of the new file."""
    for _, part in blocks(reader, item.path, report):
        converted = convert(part, item.source, item.element)
        if lost := overflows(part, item.source, converted, item.element):
            raise ConfigError(
                f"array {item.path!r}: {lost} values are too large for {item.element}; choose another type"
            )
        yield converted


def averages_of(reader: Reader) -> dict[str, str]:
    """Return the path of each parameter's moving average, by the parameter's path.

    Raises
    ------
    ConfigError
        If the checkpoint has no moving averages, or was saved before the first step.
    """
    averages = {PARAMETERS + path.removeprefix(AVERAGES): path for path in reader.arrays if path.startswith(AVERAGES)}
    if not averages:
        raise ConfigError(f"checkpoint {reader.name} holds no average of the parameters: it was trained without ema")
    optimizer = reader.attributes.get("mpizero", {}).get("optimizer") or {}
    if not optimizer.get("step_count"):
        raise ConfigError(f"checkpoint {reader.name} is of no step yet: the average is the parameters; export these")
    return averages


def _tied(reader: Reader, items: Sequence[ExportedArray]) -> list[ExportedArray]:
    """Return a description for each further name of a tied parameter among ``items``, under that name."""
    by_name = {item.name: item for item in items}
    uses = reader.attributes.get("mpizero", {}).get("tied", {}).items()
    pairs = [(by_name.get(home), use) for use, home in uses]
    return [dataclasses.replace(item, name=use) for item, use in pairs if item is not None]


def export_bytes(reader: Reader, *, state: bool = False, pattern: str | None = None) -> int:
    """Return the number of bytes that :func:`export` with the same arguments reads from the checkpoint."""
    return sum(nbytes_of(reader, item.path) for item in chosen(reader, state=state, dtype=None, pattern=pattern))


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
            if match := _wanted(old, name):
                name = new.replace("*", match[1]) if "*" in new else new
                break
        return name if name.startswith((PARAMETERS, OPTIMIZER)) else PARAMETERS + name


def _wanted(old: str, name: str) -> re.Match[str] | None:
    """Match a tensor's name against ``old``, a name with at most one ``*``; group 1 is the text that ``*`` matches."""
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
        If a name in ``rules.names`` or a pattern in ``rules.drop`` or ``rules.transpose`` matches no tensor, values are
        too large for a type, or ``out`` exists and may not be replaced.
    """
    check_free(os.fspath(out), replace)
    tensors: dict[str, Tensor] = {}
    for name in sorted(source.tensors):
        if any(fits(name, pattern) for pattern in rules.drop):
            continue
        path = check_path(rules.path(name))
        if path in tensors:
            raise CheckpointError(f"{source.path}: tensors {tensors[path].name!r} and {name!r} both become {path!r}")
        tensors[path] = source.tensors[name]
    _check_rules(source, rules, tensors)
    shapes = {path: _imported_type(source, tensor, path, rules) for path, tensor in tensors.items()}
    if expected is not None:
        _check_model(source.path, shapes, expected)
    arrays = [
        LocalArray(
            path, shape, stored_type(element), ((0, _imported_values(source, tensors[path], path, rules, element)),)
        )
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
    section = adapted.get("mpizero")
    if isinstance(section, dict) and not any(path.startswith(OPTIMIZER) for path in arrays):
        section["optimizer"] = None
    adapted.pop(BFLOAT16, None)
    if tagged := [path for path, (_, element) in arrays.items() if element == BFLOAT16]:
        adapted[BFLOAT16] = tagged
    return adapted


def _check_rules(source: TensorFile, rules: ImportRules, tensors: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` if a name to map, or a pattern to drop or to transpose, fits none: a misspelt one."""
    no_tensor = f"no tensor of {source.path}"
    unused = [f"map {p}: {no_tensor}" for p, _ in rules.names if not any(_wanted(p, name) for name in source.tensors)]
    unused += [f"drop {p}: {no_tensor}" for p in rules.drop if not any(fits(name, p) for name in source.tensors)]
    unused += [f"transpose {p}: no array" for p in rules.transpose if not any(matches(path, p) for path in tensors)]
    if unused:
        raise ConfigError(f"{unused[0]} has such a name")


def _imported_type(source: TensorFile, tensor: Tensor, path: str, rules: ImportRules) -> tuple[tuple[int, ...], str]:
    """Return the shape and the element type that a tensor will have in the checkpoint, as the array ``path``."""
    if tensor.element is None:
        raise CheckpointError(
            f"{source.path}: tensor {tensor.name!r} has elements of type {tensor.code}, which a checkpoint cannot "
            "hold; it can be left out (--drop)"
        )
    turned = any(matches(path, pattern) for pattern in rules.transpose)
    element = as_wanted(tensor.element, rules.dtype)
    return (tensor.shape[::-1] if turned else tensor.shape), element


def _imported_values(source: TensorFile, tensor: Tensor, path: str, rules: ImportRules, element: str) -> Array:
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


def _check_model(name: str, arrays: Expected, expected: Expected) -> None:
    with_state = any(path.startswith(OPTIMIZER) for path in arrays)
    wanted = {path: value for path, value in expected.items() if with_state or not path.startswith(OPTIMIZER)}
    problems = []
    if missing := [short_name(path) for path in wanted if path not in arrays]:
        problems.append(f"missing: {list_few(missing)}; another name of it can be mapped (--map OLD=NEW)")
    if extra := [short_name(path) for path in arrays if path not in wanted]:
        problems.append(f"unexpected: {list_few(extra)}; what is not wanted can be left out (--drop)")
    for path, (shape, element) in wanted.items():
        if path in arrays and arrays[path] != (shape, element):
            has, hint = arrays[path], ""
            if has[0] == shape:
                hint = f" (--dtype {element} converts)" if has[1] in FLOATING and element in FLOATING else ""
            elif has[0] == shape[::-1]:
                hint = f" (--transpose {short_name(path)} turns it)"
            problems.append(f"{short_name(path)} is {has[1]} {list(has[0])}, expected {element} {list(shape)}{hint}")
    if problems:
        raise CheckpointError(f"{name} holds another model: {'; '.join(problems[:4])}")


def loadable(element: str | None, target: str) -> bool:
    """Tell whether elements of the type ``element`` can be loaded as ``target``: the same, or both are floats."""
    return element == target or (element in FLOATING and target in FLOATING)


@dataclass(frozen=True)
class ParameterFile(ABC):
    """Provide the parameters of a file by name.

    Attributes
    ----------
    path : str
        The path of the file.
    arrays : mapping
        Shape and element type (None for a type that cannot be read) of each parameter by name.
    """

    path: str
    arrays: Mapping[str, tuple[tuple[int, ...], str | None]]

    @abstractmethod
    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the arrays in the ``pieces`` of each request with elements of the parameter that its ``path`` names.

        Elements are converted to the type of these arrays.

        Collective over the communicator with which the file was opened; a rank may request nothing. The contents of the
        pieces are undefined after an error.
        """


@dataclass(frozen=True)
class _CheckpointParameters(ParameterFile):
    """Read the parameters of an open checkpoint; every value is verified by its checksum."""

    reader: Reader

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the arrays in ``requests``; values stored in another type are read into new memory, then converted."""
        stored = []
        for request in requests:
            shape, element = self.arrays[request.path]
            assert element is not None
            dtype = stored_type(element)
            same = element == request.dtype.name
            pieces = [(start, values if same else np.empty(values.size, dtype)) for start, values in request.pieces]
            stored.append(LocalArray(PARAMETERS + request.path, shape, dtype, tuple(pieces)))
        self.reader.read(stored)
        for request, filled in zip(requests, stored, strict=True):
            for (_, values), (_, read) in zip(request.pieces, filled.pieces, strict=True):
                if values is not read:
                    _convert_into(self, request.path, read, values)


@dataclass(frozen=True)
class _FileParameters(ParameterFile):
    """Read tensors of a memory-mapped safetensors file, or, one at a time in memory, arrays of an ``.npz`` file."""

    file: TensorFile | NpzFile

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Copy the ranges of elements that ``requests`` describe out of the file, into the arrays of ``requests``."""
        for request in requests:
            parameter = self.file.values(request.path)
            for start, values in request.pieces:
                part = np.require(parameter[start : start + values.size], requirements="A")
                _convert_into(self, request.path, part, values)


def _convert_into(file: ParameterFile, name: str, source: Array, out: Array) -> None:
    """Convert values of a parameter from the file's element type, and write them to ``out``."""
    element = file.arrays[name][1]
    assert element is not None
    out[:] = convert(source, element, out.dtype.name)
    if lost := overflows(source, element, out, out.dtype.name):
        raise CheckpointError(f"{file.path}: parameter {name!r}: {lost} values are too large for {out.dtype.name}")


@contextmanager
def open_parameters(path: str | os.PathLike[str], comm: Communicator) -> Iterator[ParameterFile]:
    """Open a checkpoint or a run (folders), a safetensors file or an ``.npz`` file, and yield its parameters.

    Collective over ``comm``; the path of rank 0 is used, and every rank reads the file. The first bytes of a file tell
    its kind.

    Raises
    ------
    CheckpointMissingError
        If there is nothing at ``path``.
    CheckpointError
        If the file is damaged, or of an unknown kind.
    ConfigError
        If the package safetensors is needed and missing.
    """
    requested, name = os.fspath(path), ""
    with all_ranks(comm, "parameter file"):
        if comm.rank == 0:
            name = str(find_checkpoint(Path(requested))) if os.path.isdir(requested) else requested
    name = comm.broadcast_object(name, 0, "parameter file")
    kind = ""
    with all_ranks(comm, "parameter file"):
        if not os.path.exists(name):
            raise CheckpointMissingError(f"{name}: no such file or folder")
        kind = "checkpoint" if os.path.isdir(name) else _kind_of(name)
    if kind == "checkpoint":
        with open_checkpoint(name, comm) as reader:
            elements = element_types(reader)
            types = {short_name(p): (reader.arrays[p][0], elements[p]) for p in elements if p.startswith(PARAMETERS)}
            yield _CheckpointParameters(reader.name, types, reader)
        return
    files: list[TensorFile | NpzFile] = []
    with all_ranks(comm, "parameter file"):
        files.append(NpzFile(os.path.realpath(name)) if kind == "npz" else TensorFile(name))
    arrays: dict[str, tuple[tuple[int, ...], str | None]]
    with files[0] as file:
        if isinstance(file, NpzFile):
            arrays = {name: (shape, dtype.name) for name, (shape, dtype) in file.arrays.items()}
        else:
            arrays = {name: (tensor.shape, tensor.element) for name, tensor in file.tensors.items()}
        yield _FileParameters(file.path, arrays, file)


def _kind_of(name: str) -> str:
    with open(name, "rb") as file:
        begin = file.read(9)
    if begin[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz"
    if begin[8:] == b"{":
        return "safetensors"
    raise CheckpointError(
        f"{name}: neither a checkpoint (a folder) nor a safetensors or .npz file; of a PyTorch file write "
        "model.state_dict() with safetensors.torch.save_file"
    )
