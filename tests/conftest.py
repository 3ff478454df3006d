from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

pytest_plugins = ["mpizero.testing.plugin"]

# Every rank of a job must draw the same examples, and a suite that repeats itself is worth more than luck.
settings.register_profile(
    "mpizero",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("mpizero")


def pytest_sessionstart() -> None:
    """Load a kernel before all tests: if it must be compiled, the line about that is in none of their outputs."""
    from mpizero.kernels.cpu import update

    update.sgd.load("f")


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of later collections of garbage, which measurements ask for."""
    gc.collect()
    gc.freeze()
