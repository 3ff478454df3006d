"""The kit for tests of code that uses mpizero: threads as ranks, Taylor and adjoint tests, pytest fixtures.

``pytest_plugins = ["mpizero.testing.plugin"]`` in a top-level ``conftest.py`` brings the fixtures; run the tests with
``mpiexec -n 4 python -m mpi4py -m pytest --with-mpi``.
"""

from mpizero.testing.identities import adjoint_test, taylor_test
from mpizero.testing.ranks import assert_same_as_serial, parallel_assert
from mpizero.testing.threads import run_in_threads

__all__ = ["adjoint_test", "assert_same_as_serial", "parallel_assert", "run_in_threads", "taylor_test"]
