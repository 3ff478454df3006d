from __future__ import annotations

import os
import tempfile

import pytest

# Most of the time is XLA's, and tests and the programs that they start compile the same functions again and again.
COMPILED = tempfile.TemporaryDirectory(prefix="jax-cache-")
SHARED = {
    "JAX_COMPILATION_CACHE_DIR": COMPILED.name,
    "JAX_COMPILATION_CACHE_MAX_SIZE": "1000000000",  # any limit: without one, files are written without a lock
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update({name: os.environ.get(name, value) for name, value in SHARED.items()})


@pytest.fixture
def wide():
    """JAX computes in 64 bits, too."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
