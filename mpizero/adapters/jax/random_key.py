"""Make the random keys that a user's functions are given."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpizero.adapters.derived_seed import derived_seed
from mpizero.types import Array, Run


def key_data(run: Run, number: int) -> Array:
    """Return two integers of 32 bits from which :func:`make_key` makes the key of block ``number``. Not collective.

    They depend on seed, step and first sample of ``run``. They are an argument of the compiled function, which is
    therefore compiled once; a Python integer of 64 bits would lose half of them where JAX has only 32.
    """
    seed = derived_seed(run, number)
    return np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)


def make_key(data: Any) -> Any:
    """Return a key of ``jax.random`` made from what :func:`key_data` returned; None for None. Not collective."""
    return None if data is None else jax.random.fold_in(jax.random.key(data[0]), data[1])
