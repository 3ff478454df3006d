"""Multiply, sum and check arrays of NumPy or CuPy for layers, and compute the start values of parameters.

:func:`matmul` and the functions after it take arrays on the host and on a GPU alike. Functions called ``require_...``
and ``as_...`` check the inputs of layers. Start values (:func:`start_values_of`, :func:`initial_values`) are computed
from the seed, the parameter's name and the element's index, never from a rank, so they do not depend on how a parameter
is cut. :func:`keep_freed_memory` keeps the memory of freed activations in the process, so that the next step causes no
page faults for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import unmasked
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.kernels import gpu, recording
from mpizero.kernels import matmul as host_products
from mpizero.kernels import namespace as namespace
from mpizero.layout.tensor_parts import part_rows, part_runs, take_rows
from mpizero.types import Array, ParameterSpec, Part, as_reals, complex_type

#: ``dtype.kind`` of real numbers, and ``dtype.char`` of the types that kernels take.
_REAL, _FLOATS = frozenset("biuf"), frozenset("fd")


def matmul(a: Array, b: Array, out: Array | None = None, between: Callable[[], object] | None = None) -> Array:
    """Return the product of two matrices, written to ``out`` if that is given.

    NumPy arrays are multiplied by :mod:`mpizero.kernels.matmul`, and arrays on a GPU by :mod:`mpizero.kernels.gpu`.
    ``between``, a function that polls messages, for example, is called repeatedly during long products of NumPy arrays.
    """
    if isinstance(a, np.ndarray):
        return host_products.matmul(a, b, out, between)
    return gpu.matmul(a, b, out)


def operand(x: Array) -> Any:
    """Return ``x`` in the form that :func:`multiply` takes: ``x`` itself, or a copy in 16 bits.

    The copy is made on a GPU whose matrix products are set to 16 bits. Slices of a returned operand, and the operand
    with its last two axes swapped, can also be passed to :func:`multiply`.
    """
    return x if isinstance(x, np.ndarray) else gpu.operand(x)


def multiply(a: Any, b: Any, out: Array) -> None:
    """Write the batched matrix product ``a @ b``, over the last two axes, to ``out``.

    ``a`` and ``b`` were returned by :func:`operand`. All axes before the last two are the same in ``a``, ``b`` and
    ``out``.
    """
    if isinstance(out, np.ndarray):
        for place in np.ndindex(out.shape[:-2]):
            host_products.matmul(a[place], b[place], out[place])
    else:
        gpu.multiply(a, b, out)


def sum_rows(dy: Array, out: Array) -> None:
    """Write the sum of a matrix's rows to ``out``, for the gradient of a bias.

    On the host the rows are added in ascending order. On a GPU that order would need one thread for each column and
    leave most of the GPU idle. So CuPy adds the rows in another order, the same in every call.
    """
    xp = namespace(dy)
    if xp is np:
        rows = contiguous(dy)
        kernels.backend(rows).layers.column_sums(rows, out)
    else:
        xp.sum(dy, axis=0, out=out)


def vector(like: Array, value: float) -> Array:
    """Return an array of one element, ``value``, in ``like``'s dtype: the form in which kernels take scalars.

    A Python float would make a kernel compute in float64. A returned NumPy array is cached and read-only.
    """
    if isinstance(like, np.ndarray):
        return _host_vector(value, like.dtype)
    return namespace(like).full(1, value, like.dtype)


@lru_cache(maxsize=256)
def _host_vector(value: float, dtype: np.dtype[Any]) -> Array:
    result = np.full(1, value, dtype)
    result.setflags(write=False)
    return result


def known(dx: Array | None) -> Array:
    """Return ``dx``, the input gradient that a layer returned, and assert for type checkers that it is not None."""
    assert dx is not None
    return dx


def as_rows(x: Array, features: int, dtype: np.dtype[Any], where: str) -> Array:
    """Return ``x`` as a contiguous matrix of ``features`` columns and of ``dtype``, without a copy if possible.

    The last axis of ``x`` must have ``features`` elements. ``where`` is the layer's name for error messages.
    """
    require_numbers(x, where)
    if x.shape[-1:] != (features,):
        raise DataError(f"{where}: takes {features} features on the last axis, the input has shape {tuple(x.shape)}")
    rows = x.reshape(-1, features) if x.size else x.reshape(int(np.prod(x.shape[:-1])), features)
    return contiguous(rows, dtype)


def contiguous(x: Array, dtype: Any = None) -> Array:
    """Return ``x`` itself if it is contiguous and of ``dtype`` (None: of any), else a contiguous copy in ``dtype``."""
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if type(x) is np.ndarray:
        if x.flags.c_contiguous and x.dtype == dtype:
            return x
        return copied(x, dtype)
    result: Array = namespace(x).ascontiguousarray(x, dtype=dtype)
    return result


def copied(x: Array, dtype: Any) -> Array:
    """Return a contiguous copy of ``x`` in ``dtype``."""
    copy: Array = namespace(x).empty(x.shape, dtype)
    recording.assign(copy, x)
    return copy


def add_to(out: Array, value: Array) -> None:
    """Add ``value`` to ``out``, in place."""
    if type(out) is np.ndarray:
        recording.call(np.add, out, value, out)
    else:
        out += value


def add_bias(x: Array, bias: Array) -> None:
    """Add ``bias`` to every row of ``x`` (..., features), in place."""
    if x.flags.c_contiguous and x.size:
        rows = x.reshape(-1, x.shape[-1])
        kernels.backend(rows).layers.add_bias(rows, bias, rows)
    else:
        add_to(x, bias)


def sum_samples(x: Array, out: Array) -> None:
    """Write the sum of ``x`` over its first axis to ``out``."""
    if type(out) is np.ndarray:
        recording.call(np.add.reduce, x, 0, None, out)
    else:
        namespace(x).sum(x, axis=0, out=out)


def require_array(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of NumPy or CuPy.

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DataError(f"{where}: takes arrays, the {what} is of type {type(x).__name__}; give numpy.asarray of it")


def require_numbers(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of real numbers (float, integer or bool).

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if getattr(getattr(x, "dtype", None), "kind", "") not in _REAL:
        require_array(x, where, what)
        advice = "; give its parts as real numbers" if x.dtype.kind == "c" else ""
        raise DataError(f"{where}: takes real numbers, the {what} has dtype {x.dtype}{advice}")


def require_floats(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of float32 or float64, the types that kernels take.

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if getattr(getattr(x, "dtype", None), "char", "") not in _FLOATS:
        require_array(x, where, what)
        advice = "; cast it with astype(numpy.float32)" if x.dtype.kind in "biuf" else ""
        raise DataError(f"{where}: takes float32 or float64, the {what} has dtype {x.dtype}{advice}")


def require_sequences(x: Any, features: int | None, where: str) -> None:
    """Raise :class:`DataError` unless ``x`` has the shape (samples, length, features).

    ``features=None`` allows any number of features. ``where`` is the layer's name in the message.
    """
    require_array(x, where)
    if x.ndim != 3 or features not in (None, x.shape[2]):
        expected = "features" if features is None else features
        raise DataError(f"{where}: takes (samples, length, {expected}), the input has shape {tuple(x.shape)}")


def as_ids(x: Array, bound: int, where: str) -> Array:
    """Return integer ids as contiguous int64; raise :class:`DataError` if one is not in [0, ``bound``).

    ``where`` is the layer's name in the message.
    """
    require_array(x, where)
    if x.dtype.kind not in "iu":
        raise DataError(f"{where}: takes integer ids, the input has dtype {x.dtype}; cast it with astype(numpy.int64)")
    recording.call(_require_ids, x, bound, where)
    return contiguous(x, np.int64)


def _require_ids(x: Array, bound: int, where: str) -> None:
    if x.size and (int(x.min()) < 0 or int(x.max()) >= bound):
        raise DataError(
            f"{where}: takes ids from 0 to {bound - 1}, the input has ids from {int(x.min())} to {int(x.max())}; "
            "make the vocabulary larger or map the ids into it"
        )


#: ``fill(spec, start, stop, out)`` writes elements ``start:stop`` of a parameter's start values to ``out``.
StartValues = Callable[[ParameterSpec, int, int, Array], None]


def start_values_of(model: Any) -> StartValues:
    """Return a function that writes any range of a parameter's start values. Not collective.

    For a model of blocks, start values are computed from ``spec.init``, unless the model's attribute ``start_values``
    (a mapping from global names to arrays of the parameters' shapes) has an array for the parameter. The attribute is
    read once, in this call, so it may be a property that makes new arrays. If a functional model (one function) has no
    ``start_values``, the arrays in its attribute ``parameters`` are the start values.
    """
    start_values = getattr(model, "start_values", None)
    if start_values is None:
        start_values = getattr(model, "parameters", {})

    def fill(spec: ParameterSpec, start: int, stop: int, out: Array) -> None:
        name = spec.guest or spec.name
        if name not in start_values:
            initial_values(spec, model.seed, start, stop, out)
            return
        array, part = np.asarray(unmasked(start_values[name], f"parameter {name!r}")), spec.part
        if spec.complex:
            array = np.asarray(array, complex_type(out.dtype))
        shape = spec.shape if part is None else part.shape
        if array.shape != shape:
            raise LayoutError(f"parameter {name} has shape {shape}, its start values have shape {array.shape}")
        if part is not None:
            array = np.take(array, np.r_[tuple(slice(*ends) for ends in part.ranges)], part.axis)
        out[:] = as_reals(array)[start:stop]

    return fill


def initial_values(spec: ParameterSpec, seed: int, start: int, stop: int, out: Array) -> None:
    """Fill ``out`` with elements ``start:stop`` of a parameter's flat C-order start values.

    The values do not depend on how a parameter is cut: ranges of elements and tensor-parallel parts (``spec.part``) get
    the values that they have in the whole parameter.

    Parameters
    ----------
    spec : ParameterSpec
        The parameter's spec, with its global name. For a tied use pass the spec of the shared parameter. If
        ``spec.guest`` names a parameter of another pipeline stage, this parameter is a copy of that one: it gets the
        same start values, and must declare the same ``init``.
    seed : int
        The model's seed.
    start, stop : int
        The range of flat elements to compute. If ``spec.part`` is given, they are counted within the part.
    out : Array
        Contiguous 1-D array of ``stop - start`` elements, float32 or float64.
    """
    if not 0 <= start <= stop <= spec.size or out.shape != (stop - start,):
        raise LayoutError(
            f"elements {start}:{stop} of {spec.name} ({spec.size} elements) cannot fill an array of shape {out.shape}"
        )
    kind = spec.init.kind
    if kind in ("zeros", "ones"):
        out[...] = kind == "ones"
        if spec.complex:  # real and imaginary parts alternate, and the imaginary part of 1 is 0
            out[(start + 1) % 2 :: 2] = 0
        return
    fill = _random(spec, seed, out)
    if spec.part is None:
        fill(start, out)
    elif out.size:
        _fill_part(spec, spec.part, fill, start, out)


#: Second number that random start values depend on, besides the key. The parameter's name is already in the key, so all
#: parameters use the same number.
_SITE = 0

#: ``fill(start, out)`` writes the values of a parameter from element ``start`` on.
_Fill = Callable[[int, Array], None]


def _random(spec: ParameterSpec, seed: int, like: Array) -> _Fill:
    """Return a function ``fill(start, out)``, which writes random start values to ``out``, from element ``start`` on.

    ``like`` is an array of the library (NumPy or CuPy) and dtype that ``out`` will have.
    """
    key0, key1 = _key(seed, spec.guest or spec.name)
    random, scale = kernels.backend(like).reduction, spec.init.scale
    if spec.init.kind == "normal":
        deviation = vector(like, scale / math.sqrt(2) if spec.complex else scale)
        return lambda first, out: random.fill_normal(key0, key1, _SITE, first, out, deviation)
    if spec.init.kind == "uniform":
        low, high = vector(like, -scale), vector(like, scale)
        return lambda first, out: random.fill_uniform(key0, key1, _SITE, first, out, low, high)
    kind = spec.init.kind
    raise ConfigError(f'{spec.name}: Init kind {kind!r} is not one of "zeros", "ones", "normal", "uniform"')


#: Fixed cost of filling one contiguous run of a tensor-parallel part, in random numbers: the call, and the numbers that
#: are thrown away at its ends. Where many short runs cost too much, whole rows are computed and the runs copied out.
_RUN_COST = 1500
#: Largest number of elements of whole rows that are computed at once.
_ROWS_AT_ONCE = 1 << 16


def _fill_part(spec: ParameterSpec, part: Part, fill: _Fill, start: int, out: Array) -> None:
    """Fill ``out`` with start values of a tensor-parallel part, from flat element ``start`` of the part on."""
    rows, stop = part_rows(part), start + out.size
    if rows.full > _ROWS_AT_ONCE or rows.local + _RUN_COST * len(rows.runs) <= rows.full:
        for run in part_runs(part, spec.shape, start, stop):
            fill(run.full, out[run.local - start : run.local - start + run.size])
        return
    at_once, end = _ROWS_AT_ONCE // rows.full, -(-stop // rows.local)
    buffer = namespace(out).empty(min(at_once, end - start // rows.local) * rows.full, out.dtype)
    for row in range(start // rows.local, end, at_once):
        filled = buffer[: min(at_once, end - row) * rows.full]
        fill(row * rows.full, filled)
        origin = row * rows.local
        low, high = max(start, origin), min(stop, origin + at_once * rows.local)
        take_rows(rows, filled, low - origin, out[low - start : high - start])


def _key(seed: int, name: str) -> tuple[int, int]:
    """Return a 64-bit Philox key, as two 32-bit integers, made from seed and parameter name by a hash.

    The name makes sure that no two parameters share random numbers.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = -1
_LARGEST_HEAP_BLOCK = 32 << 20  # the most that glibc allows


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed blocks of up to 32 MiB for the next allocation.

    Every training step allocates memory for its activations. By default glibc returns this memory to the system when
    the step ends, and the next step has a page fault for every page, which the system fills with zeros. A GPT of dim
    256 with 4 layers and 8 x 128 tokens had 18,000 page faults a step, which took 30 of its 234 ms on a virtual
    machine; with this setting it had none. In return, the process keeps the memory of its peak of activations between
    steps. The setting holds for the whole process, cannot be undone, and changes no result. Call this function at the
    start of a program that mainly trains.

    Returns
    -------
    bool
        Whether the setting took effect; False without glibc.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.nn.keep_freed_memory()  # at the start of a program that trains; with glibc
    True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = ((_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK), (_TRIM_THRESHOLD, _NEVER_TRIM))
    return all([mallopt(parameter, value) == 1 for parameter, value in settings])
