"""Pytest plugin that gives every test a new communicator, and ends all ranks when a test fails on one of them.

The plugin works together with pytest-mpi (the marker ``mpi`` and the option ``--with-mpi``). If it is registered as an
entry point of pytest, the entry point must have the name of this module. Otherwise ``pytest_plugins`` in a conftest
would register the plugin a second time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest

from mpizero.comm import Communicator

_OUTCOMES = ("passed", "failed", "skipped")
_CONTROL: pytest.StashKey[Communicator] = pytest.StashKey()


def _new_world(name: str) -> Communicator:
    from mpi4py import MPI

    from mpizero.comm.mpi import MpiCommunicator

    return MpiCommunicator(MPI.COMM_WORLD, name=name)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Provide a new communicator of all ranks, and close it after the test. Collective over all ranks."""
    communicator = _new_world(request.node.name)
    yield communicator
    communicator.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Provide a random number generator: another one on each rank, but the same in every run. Not collective."""
    control = request.config.stash.get(_CONTROL, None)
    return np.random.default_rng([len(request.node.name), 0 if control is None else control.rank])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``mpi_patience``, the seconds that a rank whose test failed waits for others. Not collective."""
    text = "seconds that a rank whose test failed waits for the others, who may be blocked in that test for ever"
    parser.addini("mpi_patience", text, default="10")


def pytest_configure(config: pytest.Config) -> None:
    """Make the communicator over which ranks compare test outcomes. Collective over all ranks with ``--with-mpi``."""
    if config.getoption("--with-mpi", default=False) or config.getoption("--only-mpi", default=False):
        config.stash[_CONTROL] = _new_world("test outcomes")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the communicator that :func:`pytest_configure` made. Collective over all ranks with ``--with-mpi``."""
    if _CONTROL in config.stash:
        config.stash[_CONTROL].close()
        del config.stash[_CONTROL]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a header line with the MPI library, this rank and the number of ranks. Not collective."""
    control = config.stash.get(_CONTROL, None)
    if control is None:
        return None
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"MPI: {vendor} {'.'.join(map(str, version))}, rank {control.rank} of {control.size}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests without the marker ``mpi`` if there are several ranks. Not collective.

    Otherwise every rank would run them.
    """
    control = config.stash.get(_CONTROL, None)
    if control is None or control.size == 1:
        return
    serial = [item for item in items if item.get_closest_marker("mpi") is None]
    if serial:
        items[:] = [item for item in items if item.get_closest_marker("mpi") is not None]
        config.hook.pytest_deselected(items=serial)


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the job if the ranks have collected different tests. Collective over all ranks with ``--with-mpi``."""
    control = session.config.stash.get(_CONTROL, None)
    if control is None:
        return
    mine = (session.testsfailed, [item.nodeid for item in session.items])
    found = control.allgather_object(mine, tag="collected tests")
    if any(other != found[0] for other in found):
        counts = ", ".join(f"rank {r}: {len(ids)} tests, {failed} errors" for r, (failed, ids) in enumerate(found))
        _end(session.config, control, f"the ranks have collected different tests ({counts})", control.rank == 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Compare the outcome of a test marked ``mpi`` between ranks, before its teardown; end the job if it differs.

    Collective over all ranks with ``--with-mpi``: once per test, after the test function or after a set-up that did not
    pass.
    """
    report = yield
    control = item.config.stash.get(_CONTROL, None)
    decisive = report.when == "call" or (report.when == "setup" and not report.passed)
    if control is not None and control.size > 1 and decisive and item.get_closest_marker("mpi") is not None:
        _agree(item, report, control)
    return report


def _agree(item: pytest.Item, report: pytest.TestReport, control: Communicator) -> None:
    mine = np.array([_OUTCOMES.index(report.outcome)], np.int8)
    outcomes = np.full(control.size, -1, np.int8)
    request = control.iallgather(mine, outcomes, tag=item.nodeid)
    started, patience = time.monotonic(), float(item.config.getini("mpi_patience"))
    while not request.test():
        waited = time.monotonic() - started
        if report.failed and waited > patience:
            reason = f"{item.nodeid} failed here, and others have not ended it {patience:g} s later"
            _end(item.config, control, f"{reason}\n{report.longreprtext}", speaks=True)
        time.sleep(0 if waited < 1e-3 else 1e-3)
    if (outcomes != mine).any():
        said = ", ".join(f"rank {r}: {_OUTCOMES[o]}" for r, o in enumerate(outcomes))
        failed = outcomes == _OUTCOMES.index("failed")
        text = f"{item.nodeid} has several outcomes ({said})\n{report.longreprtext}"
        _end(item.config, control, text, speaks=report.failed or (not failed.any() and control.rank == 0))


def _end(config: pytest.Config, control: Communicator, text: str, speaks: bool) -> None:
    """End the MPI job, and do not return; ranks where ``speaks`` is True print ``text`` first.

    The other ranks wait two seconds, so that the text is printed before the job ends.
    """
    if speaks:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        print("".join(f"[rank {control.rank}] {line}\n" for line in text.splitlines()), file=sys.stderr, flush=True)
    time.sleep(0.5 if speaks else 2.0)
    control.abort()
