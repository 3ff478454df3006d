"""Provide numerical kernels: formulas are written once, compiled for CPU and GPU, and checked against plain NumPy.

``backend(array)`` returns the package of kernels for this kind of array: :mod:`mpizero.kernels.cpu` or
:mod:`mpizero.kernels.cuda`. Both packages have the same modules of kernels (``layers``, ``attention``, ``losses``,
``update``, ``reduction``). These modules are imported on first use, and a kernel is compiled or loaded from disk at its
first call. ``namespace(array)`` returns the array library, NumPy or CuPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mpizero.kernels import cpu, cuda
from mpizero.types import Array

__all__ = ["all_finite", "backend", "cpu", "cuda", "namespace", "to_host"]


def backend(array: Any) -> ModuleType:
    """Return the package of kernels for ``array``, :mod:`mpizero.kernels.cpu` or :mod:`mpizero.kernels.cuda`.

    Raises
    ------
    TypeError
        If ``array`` is neither a NumPy nor a GPU array.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import kernels
    >>> kernels.backend(np.zeros(2)).__name__
    'mpizero.kernels.cpu'
    >>> kernels.backend([0.0, 0.0])
    Traceback (most recent call last):
    TypeError: kernels work on NumPy or CUDA arrays, got list
    """
    if isinstance(array, np.ndarray):
        return cpu
    if hasattr(array, "__cuda_array_interface__"):
        return cuda
    raise TypeError(f"kernels work on NumPy or CUDA arrays, got {type(array).__name__}")


def all_finite(array: Any) -> bool:
    """Tell whether no element of a contiguous 1-D array is infinite or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import kernels
    >>> kernels.all_finite(np.array([1.0, 2.0])), kernels.all_finite(np.array([1.0, np.inf]))
    (True, False)
    """
    return bool(backend(array).reduction.all_finite(array))


class ArrayLibrary(Protocol):
    """Declare for type checkers that the functions of NumPy and CuPy return arrays."""

    def __getattr__(self, name: str) -> Callable[..., Array]: ...


def namespace(array: Any) -> ArrayLibrary:
    """Return the library of an array, NumPy or CuPy: a module with NumPy's functions.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import kernels
    >>> kernels.namespace(np.zeros(2)) is np
    True
    """
    if isinstance(array, np.ndarray):
        return np
    package = type(array).__module__.partition(".")[0]
    if package == "cupy" or not hasattr(array, "__array_namespace__"):  # CuPy's arrays have it from CuPy 14 on
        return sys.modules[package]
    library: ArrayLibrary = array.__array_namespace__()
    return library


def to_host(array: Any) -> Any:
    """Return a NumPy copy of a GPU array; return any other object itself.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import kernels
    >>> kernels.to_host(np.arange(3))
    array([0, 1, 2])
    """
    return array.get() if hasattr(array, "__cuda_array_interface__") else array
