"""Extend pytest: give tests new communicators, and let a test that fails on one rank fail on all ranks.

If other ranks are blocked in a test that has failed on one rank, that rank prints its failures and ends the job.

The plugin works together with pytest-mpi (the marker ``mpi`` and the option ``--with-mpi``). If it is registered as an
entry point of pytest, the entry point must have the name of this module. Otherwise ``pytest_plugins`` in a conftest
would register the plugin a second time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from math import inf
from typing import Any

import numpy as np
import pytest

from mpizero.comm import Communicator, Request

_OUTCOMES = ("passed", "failed", "skipped")
_CONTROL: pytest.StashKey[Communicator] = pytest.StashKey()
_ENDS: pytest.StashKey[Communicator] = pytest.StashKey()
_STATUS: pytest.StashKey[int] = pytest.StashKey()


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
    """Provide a random number generator, seeded by the rank and the length of the test's name. Not collective."""
    control = request.config.stash.get(_CONTROL, None)
    return np.random.default_rng([len(request.node.name), 0 if control is None else control.rank])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option ``mpi_patience``: seconds to wait for other ranks after a failure. Not collective."""
    text = "seconds that a rank whose test did not pass waits for the others, who may be blocked in that test for ever"
    parser.addini("mpi_patience", text, default="10")


def pytest_configure(config: pytest.Config) -> None:
    """Create a communicator for test outcomes, and one for the end of the session. Collective with ``--with-mpi``."""
    if config.getoption("--with-mpi", default=False) or config.getoption("--only-mpi", default=False):
        config.stash[_CONTROL] = _new_world("test outcomes")
        config.stash[_ENDS] = _new_world("end of tests")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Store the exit status of the session for :func:`pytest_unconfigure`. Not collective."""
    session.config.stash[_STATUS] = exitstatus


def pytest_unconfigure(config: pytest.Config) -> None:
    """Wait until every rank has printed its summary, and close the communicators of :func:`pytest_configure`.

    Collective over all ranks with ``--with-mpi``. Ranks wait because under some launchers, and under ``python -m
    mpi4py``, the first process that exits with a status other than 0 ends the job. A rank with such a status waits at
    most ``mpi_patience`` seconds, and then ends the job itself.
    """
    if _CONTROL not in config.stash:
        return
    control, ends = config.stash[_CONTROL], config.stash[_ENDS]
    status = config.stash.get(_STATUS, pytest.ExitCode.INTERNAL_ERROR)
    if not _ends(ends.ibarrier("end"), _patience(config) if status else inf):
        _end(config, control, f"pytest has ended here with status {int(status)}, and other ranks still run")
    for communicator in (ends, control):
        communicator.close()
    del config.stash[_CONTROL], config.stash[_ENDS]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a header line with the MPI library, this rank and the number of ranks. Not collective."""
    control = config.stash.get(_CONTROL, None)
    if control is None:
        return None
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"MPI: {vendor} {'.'.join(map(str, version))}, rank {control.rank} of {control.size}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests without the marker ``mpi`` if there are several ranks, so that not every rank runs them.

    Not collective.
    """
    control = config.stash.get(_CONTROL, None)
    if control is None or control.size == 1:
        return
    serial = [item for item in items if item.get_closest_marker("mpi") is None]
    if serial:
        items[:] = [item for item in items if item.get_closest_marker("mpi") is not None]
        config.hook.pytest_deselected(items=serial)


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the session on every rank if ranks have collected different tests. Collective with ``--with-mpi``."""
    control = session.config.stash.get(_CONTROL, None)
    if control is None:
        return
    collected = (session.testsfailed, [item.nodeid for item in session.items])
    by_rank = control.allgather_object(collected, tag="collected tests")
    if any(other != by_rank[0] for other in by_rank):
        counts = ", ".join(f"rank {r}: {len(ids)} tests, {failed} errors" for r, (failed, ids) in enumerate(by_rank))
        raise session.Interrupted(f"the ranks have collected different tests ({counts})")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test marked ``mpi`` that has failed on one rank fail on all ranks.

    Collective over all ranks with ``--with-mpi``, for each report of a test function, of a teardown, and of a set-up
    that did not pass.
    """
    report = yield
    control = item.config.stash.get(_CONTROL, None)
    decisive = report.when != "setup" or not report.passed
    if control is not None and control.size > 1 and decisive and item.get_closest_marker("mpi") is not None:
        _agree(item, report, control)
    return report


def _agree(item: pytest.Item, report: pytest.TestReport, control: Communicator) -> None:
    outcome = np.array([_OUTCOMES.index(report.outcome)], np.int8)
    outcomes = np.full(control.size, -1, np.int8)
    request = control.iallgather(outcome, outcomes, tag=f"{item.nodeid}{' teardown' * (report.when == 'teardown')}")
    patience = _patience(item.config)
    if not _ends(request, inf if report.passed else patience):
        result = f"{item.nodeid} {report.outcome} on rank {control.rank}"
        reason = f"{result}, and others have not ended it {patience:g} s (mpi_patience) later"
        if report.failed:
            report.sections.append(("other ranks", reason))
        else:
            report.outcome, report.longrepr = "failed", reason
        summarized = _show_summary(item, report)
        _end(item.config, control, reason if summarized else f"{reason}\n{report.longreprtext}")
    if (outcomes != outcome).any():
        _merge(item, report, control, outcomes)


def _merge(item: pytest.Item, report: pytest.TestReport, control: Communicator, outcomes: np.ndarray[Any, Any]) -> None:
    """Report a test whose outcomes differ between ranks as failed, with the tracebacks of the ranks that failed."""
    said = ", ".join(f"rank {r}: {_OUTCOMES[o]}" for r, o in enumerate(outcomes))
    message = f"{item.nodeid} has several outcomes ({said})"
    config = item.config
    failure = config.hook.pytest_report_to_serializable(config=config, report=report) if report.failed else None
    everywhere = control.allgather_object(failure, tag="failures")
    if not report.failed:
        report.outcome, report.longrepr = "failed", message
    failed = {
        rank: config.hook.pytest_report_from_serializable(config=config, data=data)
        for rank, data in enumerate(everywhere)
        if data is not None
    }
    for rank, other in failed.items():
        if report.longrepr == message:  # the first failure is reported as if it were this rank's
            report.longrepr, report.sections = other.longrepr, other.sections
            if (crash := getattr(other.longrepr, "reprcrash", None)) is not None:
                crash.message = f"[rank {rank}] {crash.message}"
        elif rank != control.rank:
            report.sections.append((f"rank {rank}", other.longreprtext))
    report.sections.append(("outcome by rank", message))


def _patience(config: pytest.Config) -> float:
    return float(config.getini("mpi_patience"))


def _ends(request: Request, patience: float) -> bool:
    """Wait for an MPI request, at most ``patience`` seconds; return whether it has completed."""
    started = time.monotonic()
    while not request.test():
        waited = time.monotonic() - started
        if waited > patience:
            return False
        time.sleep(0 if waited < 1e-3 else 1e-3)
    return True


def _show_summary(item: pytest.Item, report: pytest.TestReport) -> bool:
    """Print pytest's failures and summary now; return False if pytest has no terminal reporter.

    Pytest would print the failures at the end of the session, but the job is aborted before that. Fixtures are not torn
    down, because their teardown might wait for other ranks.
    """
    config = item.config
    _uncapture(config)
    item.ihook.pytest_runtest_logreport(report=report)
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None:
        return False
    terminal.ensure_newline()
    config.hook.pytest_terminal_summary(
        terminalreporter=terminal, exitstatus=pytest.ExitCode.TESTS_FAILED, config=config
    )
    terminal.summary_stats()
    terminal.flush()
    return True


def _uncapture(config: pytest.Config) -> None:
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)


def _end(config: pytest.Config, control: Communicator, text: str) -> None:
    """Print ``text`` on standard error, and abort the MPI job; do not return."""
    _uncapture(config)
    print("".join(f"[rank {control.rank}] {line}\n" for line in text.splitlines()), file=sys.stderr, flush=True)
    time.sleep(0.5)
    control.abort()
