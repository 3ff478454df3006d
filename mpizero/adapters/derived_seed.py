"""Derive seeds for the random numbers of other libraries, so that they do not depend on the number of ranks."""

from __future__ import annotations

import hashlib

from mpizero.types import Run


def derived_seed(run: Run, block: int) -> int:
    """Return a seed of 63 bits for one forward pass of one block. Not collective.

    It is a hash of the model's seed, the step, the index of the first sample within the global batch, and the number
    ``block`` of the block within the model. So a repeated forward pass draws the same numbers, and all others draw
    different ones.
    """
    text = f"{run.seed}:{run.step}:{run.first_sample}:{block}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
