"""Numerical kernels: formulas written once, compiled for CPU and GPU, checked against plain NumPy.

``backend(array)`` gives the namespace whose modules (``optimizer``, ``fused``, ``reduction``, ``copy``,
``activation``, ``norm``, ``loss``, ``embedding``, ``attention``, ``compression``, ``random``) work on arrays of that
kind. Modules are imported, and kernels compiled or loaded, on first use.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from mpizero.kernels import cpu, cuda

__all__ = ["backend", "cpu", "cuda"]


def backend(array: Any) -> ModuleType:
    """Return the kernels for ``array``: :mod:`mpizero.kernels.cpu` for NumPy's, ``cuda`` for device arrays.

    Not collective.

    Raises
    ------
    TypeError
        ``array`` is neither.
    """
    if isinstance(array, np.ndarray):
        return cpu
    if hasattr(array, "__cuda_array_interface__"):
        return cuda
    raise TypeError(f"kernels work on NumPy or CUDA arrays, got {type(array).__name__}")
