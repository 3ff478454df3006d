"""The elementary functions with their oracles in long double, arguments that meet every branch, and their hashes.

``python -m tests.golden.elementary_cases 1e8`` measures the largest errors over that many arguments a function;
``--mpmath N`` also compares N arguments of each function, and those of errors above 0.9 ulp, with mpmath; ``--write``
writes the hashes anew.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpizero.kernels import elementary
from mpizero.kernels.jit import kernel
from mpizero.types import Array

HASHES = Path(__file__).with_name("elementary_hashes.json")
_BLOCK = 1_000_000


def _turn(x: Array, part: int) -> Any:
    """Return the cosine (part 0) or sine (1) of 2 pi x in long double."""
    quarter = np.round(x * 4)
    angle = np.longdouble("6.283185307179586476925286766559005768394") * (x - quarter / 4).astype(np.longdouble)
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = ((cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine))
    return np.select([quarter % 4 == k for k in range(4)], [turned[k][part] for k in range(4)])


def _any_size(rng: Any, n: int, low: float, high: float) -> Array:
    return np.asarray(np.exp2(rng.uniform(low, high, n)))


def _for_exp(rng: Any, n: int, single: bool) -> Array:
    wide = rng.uniform(-86.98, 88.7, n) if single else rng.uniform(-745.2, 709.7, n)
    return np.where(rng.random(n) < 0.6, wide, rng.normal(size=n) * rng.choice([1e-6, 1e-3, 0.1, 1, 5], n))


def _for_log(rng: Any, n: int, single: bool) -> Array:
    sizes = _any_size(rng, n, -125, 127) if single else _any_size(rng, n, -1074, 1023)
    near = np.where(rng.random(n) < 0.5, rng.uniform(0.5, 2, n), 1 + rng.normal(size=n) * 0.01)
    return np.where(rng.random(n) < 0.4, sizes, near)


def _for_log1p(rng: Any, n: int, single: bool) -> Array:
    return np.where(rng.random(n) < 0.5, rng.uniform(0, 1, n), _any_size(rng, n, -80, 120 if single else 1000))


def _for_tanh(rng: Any, n: int, single: bool) -> Array:
    sizes = np.where(rng.random(n) < 0.5, rng.uniform(-22, 22, n), _any_size(rng, n, -60, 1))
    return np.where(rng.random(n) < 0.6, rng.uniform(-3, 3, n), sizes)


def _for_turn(rng: Any, n: int, single: bool) -> Array:
    return np.asarray(rng.random(n))


@dataclass(frozen=True)
class Function:
    """Hold a function of long doubles, one of mpmath by name, and what draws arguments."""

    exact: Callable[[Array], Any]
    in_mpmath: str
    draw: Callable[[Any, int, bool], Array]


_KINDS = {
    "exp": Function(np.exp, "exp(x)", _for_exp),
    "exp2": Function(np.exp2, "power(2, x)", lambda rng, n, single: rng.uniform(-126, 127.4, n)),
    "log": Function(np.log, "log(x)", _for_log),
    "log1p": Function(np.log1p, "log1p(x)", _for_log1p),
    "tanh": Function(np.tanh, "tanh(x)", _for_tanh),
    "cos_turn": Function(lambda x: _turn(x, 0), "cospi(2 * x)", _for_turn),
    "sin_turn": Function(lambda x: _turn(x, 1), "sinpi(2 * x)", _for_turn),
}
FUNCTIONS = {
    f"{name}_{kind}": function
    for kind in ("double", "single")
    for name, function in _KINDS.items()
    if (name, kind) != ("exp2", "double")  # which no kernel needs
}
_NAMES = {
    "exp": elementary.exponential,
    "log": elementary.logarithm,
    "log1p": elementary.log1p,
    "tanh": elementary.hyperbolic_tangent,
}


@functools.cache
def _compiled(name: str) -> Any:
    function, _, kind = name.rpartition("_")
    T = np.float32 if kind == "single" else np.float64  # noqa: N806
    if function == "exp2":
        one = elementary.exp2_single

        def each(x: Any, y: Any) -> None:
            for i in range(x.size):
                y[i] = one(x[i])

    elif function in _NAMES:
        one = _NAMES[function]

        def each(x: Any, y: Any) -> None:
            for i in range(x.size):
                y[i] = one(x[i], T)

    else:
        part, pair = ("cos_turn", "sin_turn").index(function), elementary.cos_sin_turn

        def each(x: Any, y: Any) -> None:
            for i in range(x.size):
                y[i] = pair(x[i], T)[part]

    return kernel("void(const T[::1], T[::1])")(each)


def evaluated(name: str, x: Array) -> Array:
    """Return the function's values, computed by a compiled loop."""
    y = np.empty_like(x)
    _compiled(name)(x, y)
    return y


def arguments(name: str, count: int, rng: Any) -> Array:
    """Draw arguments of the function's type."""
    single = name.endswith("single")
    return FUNCTIONS[name].draw(rng, count, single).astype(np.float32 if single else np.float64)


def units(found: Array, exact: Any) -> Any:
    """Return the errors in units in the last place of the exact values."""
    size = np.abs(exact.astype(found.dtype))
    unit = np.spacing(size).astype(np.longdouble)
    below = (size - np.nextafter(size, found.dtype.type(0))).astype(np.longdouble)
    unit = np.where(size > np.abs(exact), np.minimum(unit, below), unit)  # it was rounded up to a power of two
    return np.abs(found.astype(np.longdouble) - exact) / unit


def largest_error(name: str, count: int, seed: int) -> tuple[float, float, Array]:
    """Return the largest error in units, its argument, and the arguments whose errors exceed 0.9."""
    rng, worst, place, suspects = np.random.default_rng(seed), 0.0, 0.0, []
    for start in range(0, count, _BLOCK):
        x = arguments(name, min(_BLOCK, count - start), rng)
        errors = units(evaluated(name, x), FUNCTIONS[name].exact(x.astype(np.longdouble)))
        at = int(np.argmax(errors))
        suspects.append(x[errors > 0.9])
        if errors[at] > worst:
            worst, place = float(errors[at]), float(x[at])
    return worst, place, np.concatenate(suspects)


def error_by_mpmath(name: str, x: Array) -> float:
    """Return the largest error in units of the function at ``x``, by mpmath with 120 bits."""
    import mpmath

    mpmath.mp.prec = 120
    function = eval(f"lambda x: mpmath.{FUNCTIONS[name].in_mpmath}", {"mpmath": mpmath})
    worst = 0.0
    for argument, value in zip(x.tolist(), evaluated(name, x), strict=True):
        exact = function(mpmath.mpf(argument))
        unit = float(np.spacing(x.dtype.type(abs(exact))))
        worst = max(worst, float(abs(mpmath.mpf(float(value)) - exact) / unit))
    return worst


def hash_of(name: str, count: int) -> str:
    """Return the sha256 of the values at arguments that are made of integers."""
    numbers = (np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    fractions = numbers.astype(np.float64) * 2.0**-53
    if "turn" in name:
        x = fractions
    elif name.startswith("log"):
        x = fractions * 3.0
    else:
        x = fractions * 160.0 - 80.0 if name.startswith("exp") else fractions * 8.0 - 4.0
    values = evaluated(name, x.astype(np.float32 if name.endswith("single") else np.float64))
    return hashlib.sha256(values.tobytes()).hexdigest()


def main() -> int:
    """Print each function's largest error and hash; return 1 if an error is above 1 or a hash differs."""
    parser = argparse.ArgumentParser(description="Measure the errors of the elementary functions, compare their bits.")
    parser.add_argument("count", nargs="?", default="1e6", help="arguments of each function (default: 1e6)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mpmath", type=int, default=0, metavar="N", help="compare N of them with mpmath, too")
    parser.add_argument("--write", action="store_true", help=f"write the hashes to {HASHES.name}")
    options = parser.parse_args()
    expected = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    found, wrong = {}, 0
    wide = np.finfo(np.longdouble).nmant >= 63
    for name in FUNCTIONS:
        worst, place, suspects = largest_error(name, int(float(options.count)), options.seed) if wide else (0, 0, [])
        found[name] = hash_of(name, 20_000)
        told = f"largest error {worst:.4f} at {place!r}, {len(suspects)} above 0.9" if wide else "no long double"
        if options.mpmath:
            rng = np.random.default_rng(options.seed)
            x = np.concatenate([suspects, arguments(name, options.mpmath, rng)]).astype(arguments(name, 1, rng).dtype)
            told += f"; by mpmath {error_by_mpmath(name, x):.4f} of {len(x)}"
        alike = found[name] == expected.get(name)
        wrong += not (alike or options.write) or worst > 1
        print(f"{name:16} {told}; bits {found[name][:12]} {'the same' if alike else 'DIFFERS'}", flush=True)
    if options.write:
        HASHES.write_text(json.dumps(found, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
