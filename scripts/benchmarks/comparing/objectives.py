"""Define the objectives that minimizers are compared on; every interpreter calls the same compiled functions.

:func:`build` compiles ``objectives.c`` into a folder and saves the data beside it, once a comparison, because other
versions of NumPy compute other bits. :func:`load` calls the functions there by ctypes, from any interpreter.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = Any
SOURCE = Path(__file__).with_suffix(".c")
CONDUCTIVITY, ROSENBROCK, WELLS = "conductivity", "Rosenbrock, 1,001", "tilted wells, 100"
#: Those on which only methods with products with the Hessian are compared.
FOR_NEWTON = ("Rosenbrock, 1,001, from 0", WELLS)


class Objective(NamedTuple):
    """Hold a function of value and gradient, one of products with the Hessian, the start, and bounds."""

    evaluate: Callable[[Array], tuple[float, Array]]
    product: Callable[[Array, Array], Array]
    start: Array
    bounds: tuple[float, float]


def build(folder: Path) -> None:
    """Compile the functions into a folder, and save their data there."""
    command = ["cc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(folder / "objectives.so"), "-lm"]
    subprocess.run(command, check=True)
    np.savez(
        folder / "objectives.npz", logistic=logistic_samples(), conductivity=np.stack(conductivity_fields()),
        wells=0.01 * np.sin(np.arange(100.0)),
    )  # fmt: skip


def load(folder: Path) -> dict[str, Objective]:
    """Return the objectives of a folder by name."""
    with np.load(folder / "objectives.npz") as saved:
        samples, fields, near_saddle = saved["logistic"], saved["conductivity"], saved["wells"]
    library = ctypes.CDLL(str(folder / "objectives.so"))
    chain = np.where(np.arange(1001) % 2 == 0, -1.2, 1.0)
    return {
        ROSENBROCK: _objective(library, "rosenbrock", chain, (-2.0, 0.9)),
        "logistic regression": _objective(library, "logistic", np.zeros(60), (-0.5, 0.5), samples, len(samples)),
        CONDUCTIVITY: _objective(library, "conductivity", np.zeros(61), (-0.3, 0.6), fields, fields.shape[1]),
        FOR_NEWTON[0]: _objective(library, "rosenbrock", np.zeros(1001), (-2.0, 0.9)),
        WELLS: _objective(library, "wells", near_saddle, (-2.0, 0.9)),
    }


def load_pairs(folder: Path) -> Callable[[Array, Array], float]:
    """Return Rosenbrock's function of neighbouring pairs; it returns the value, and writes the gradient."""
    function = _value(ctypes.CDLL(str(folder / "objectives.so")), "pairs")
    return lambda x, slope: function(x.size, _pointer(x), 0, None, _pointer(slope))


def _objective(
    library: Any, name: str, start: Array, bounds: tuple[float, float], data: Array | None = None, rows: int = 0
) -> Objective:
    value, multiply = _value(library, name), getattr(library, f"{name}_product")
    multiply.restype = None
    long, pointer = ctypes.c_long, ctypes.c_void_p
    multiply.argtypes = [long, pointer, pointer, long, pointer, pointer]

    def evaluate(x: Array) -> tuple[float, Array]:
        x, slope = np.ascontiguousarray(x), np.empty(x.size)
        return value(x.size, _pointer(x), rows, _pointer(data), _pointer(slope)), slope

    def product(x: Array, v: Array) -> Array:
        x, v, result = np.ascontiguousarray(x), np.ascontiguousarray(v), np.empty(x.size)
        multiply(x.size, _pointer(x), _pointer(v), rows, _pointer(data), _pointer(result))
        return result

    return Objective(evaluate, product, start, bounds)


def _value(library: Any, name: str) -> Any:
    function, long, pointer = getattr(library, name), ctypes.c_long, ctypes.c_void_p
    function.restype, function.argtypes = ctypes.c_double, [long, pointer, long, pointer, pointer]
    return function


def _pointer(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def logistic_samples() -> Array:
    """Return 400 random samples of 60 features, each times its sign."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 60)) * np.logspace(0, -1.5, 60)
    sign = np.where(features @ rng.normal(size=60) + rng.normal(size=400) > 0.0, 1.0, -1.0)
    return sign[:, None] * features


def conductivity_fields(cells: int = 60) -> tuple[Array, Array]:
    """Return three sources on a line, and the fields that are measured: those of a conductivity with a step."""
    place = np.linspace(0.0, 1.0, cells + 1)
    truth = 0.5 * np.sin(2.0 * np.pi * place) + 0.8 * (abs(place - 0.6) < 0.15)
    sources = np.stack([np.exp(-(((np.linspace(0, 1, cells) - at) / 0.05) ** 2)) for at in (0.2, 0.5, 0.8)])
    return sources, np.linalg.solve(conductivity_matrix(truth), sources.T).T


def conductivity_matrix(m: Array) -> Array:
    """Return the matrix whose solutions are the fields of the conductivity ``exp(m)``."""
    edges = edge_differences(m.size)
    return edges.T @ (np.exp(m)[:, None] * edges)


def edge_differences(size: int) -> Array:
    """Return the matrix that takes values in ``size - 1`` cells to their differences at ``size`` edges."""
    edges = np.eye(size, size - 1)
    edges[np.arange(1, size), np.arange(size - 1)] = -1.0
    return edges
