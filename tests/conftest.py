from __future__ import annotations

import gc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
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

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of ``scripts/test.sh --quick``."""
    parser.addoption("--one-case", action="store_true", help="of tests with several cases run the first")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--one-case`` keep the first case of each test, of those that marks have left; all ranks keep the same."""
    if not config.getoption("--one-case"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if first[item.nodeid.partition("[")[0]] is not item])
    items[:] = first.values()


def pytest_sessionstart() -> None:
    """Load a kernel before all tests: if it must be compiled, the line about that is in none of their outputs."""
    from mpizero.kernels.cpu import update

    update.sgd.load("f")


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of later collections of garbage, which measurements ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def example() -> Callable[[str], Any]:
    """Import a program of ``examples/`` or its gallery, by its name."""

    def load(name: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(EXAMPLES / "gallery")
            patch.syspath_prepend(EXAMPLES)
            return import_module(name)

    return load
