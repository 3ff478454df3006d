"""Simulate GPUs on a machine without any: Numba's simulator runs the kernels, on arrays that behave as CuPy's do.

    from tests.support.simulated import simulate_gpus

    simulate_gpus()  # in each process that computes on them

Numba chooses its simulator when it is imported, by the environment variable ``NUMBA_ENABLE_CUDASIM=1``.
"""

from __future__ import annotations

import os

#: Whether the environment asks Numba for its simulator.
ASKED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def simulate_gpus() -> None:
    """Have this process use simulated GPUs.

    Raises
    ------
    RuntimeError
        If Numba is without its simulator.
    """
    from numba.core import config

    from mpizero.kernels.gpu import use_gpus
    from tests.support.simulated.gpus import SimulatedGpus

    if not config.ENABLE_CUDASIM:
        raise RuntimeError("Numba is without its simulator: set NUMBA_ENABLE_CUDASIM=1 before it is imported")
    use_gpus(SimulatedGpus())
