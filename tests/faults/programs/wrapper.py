"""A program between mpiexec and Python, as launchers and profilers are: ``wrapper.py KIND ARGUMENT...``.

Started by test_embedding.py.
"""

from __future__ import annotations

import subprocess
import sys

kind, command = sys.argv[1], [sys.executable, *sys.argv[2:]]
if kind.startswith("imports"):
    import mpizero  # noqa: F401
if kind == "is_rank":
    from mpi4py import MPI  # noqa: F401
sys.exit(subprocess.run(command, close_fds=not kind.endswith("passes"), check=False).returncode)
