"""Start values: functions of the seed, the parameter's name and the element's index, never of a rank."""

from __future__ import annotations

import hashlib

from mpizero import kernels
from mpizero.errors import ConfigError, LayoutError
from mpizero.nn.layer import vector
from mpizero.types import Array, ParameterSpec

#: Random site of start values. The name is already in the key, so one site serves all parameters.
_SITE = 0


def initial_values(spec: ParameterSpec, seed: int, start: int, stop: int, out: Array) -> None:
    """Fill ``out`` with elements ``start:stop`` of a parameter's flat C-order start values. Not collective.

    Any cut of a parameter into ranges gives the values of the whole.

    Parameters
    ----------
    spec : ParameterSpec
        The parameter, under its global name; a tied use starts as the parameter it shares, so ask for that one.
    seed : int
        The model's seed.
    start, stop : int
        Range of flat elements.
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
        return
    key0, key1 = _key(seed, spec.name)
    random = kernels.backend(out).random
    if kind == "normal":
        random.fill_normal(key0, key1, _SITE, start, out, vector(out, spec.init.scale))
    elif kind == "uniform":
        low, high = vector(out, -spec.init.scale), vector(out, spec.init.scale)
        random.fill_uniform(key0, key1, _SITE, start, out, low, high)
    else:
        raise ConfigError(f'{spec.name}: Init kind {kind!r} is not one of "zeros", "ones", "normal", "uniform"')


def _key(seed: int, name: str) -> tuple[int, int]:
    """Give each (seed, name) its own 64-bit Philox key, so that no two parameters share random numbers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
