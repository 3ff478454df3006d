"""Provide helpers for tests of code that uses mpizero.

They check models, compare parallel layouts of a model, and run ranks as threads of one process.

The line ``pytest_plugins = ["mpizero.testing.plugin"]`` in a top-level ``conftest.py`` adds the fixtures ``world`` and
``rng``. Run the tests with ``mpiexec -n 4 python -m mpi4py -m pytest --with-mpi``.
"""

from typing import TYPE_CHECKING, Any

from mpizero.comm.threads import run_in_threads
from mpizero.names import unknown_names
from mpizero.testing.identities import adjoint_test, taylor_test
from mpizero.testing.ranks import assert_same_as_serial, parallel_assert
from mpizero.train.verify.verdicts import Finding, Report, Verdict

if TYPE_CHECKING:
    from mpizero.train.modelcheck import ModelFinding, ModelReport, check_model
    from mpizero.train.verify.compare import compare_layouts

__all__ = [
    "Finding",
    "ModelFinding",
    "ModelReport",
    "Report",
    "Verdict",
    "adjoint_test",
    "assert_same_as_serial",
    "check_model",
    "compare_layouts",
    "parallel_assert",
    "run_in_threads",
    "taylor_test",
]


def __getattr__(name: str) -> Any:
    """Import and return a public name that needs the whole library when it is first used.

    So importing this package, which pytest does when it starts, stays fast.
    """
    if name in ("ModelFinding", "ModelReport", "check_model"):
        from mpizero.train import modelcheck

        return getattr(modelcheck, name)
    if name == "compare_layouts":
        from mpizero.train.verify.compare import compare_layouts

        return compare_layouts
    return unknown_names(__name__, __all__)(name)
