"""Communicators that are never closed are refused, with the way out, before MPI ends the process for them."""

from __future__ import annotations

import pytest

import mpizero as mz
from mpizero.errors import StateError
from mpizero.guard import guard


@pytest.mark.mpi
def test_configurations_that_are_never_closed_are_refused_before_mpi_has_no_room(monkeypatch):
    from mpi4py import MPI

    from mpizero.guard import call_trace

    assert call_trace.MOST_LIVE < 2048  # MPICH's numbers of communicators and windows
    monkeypatch.setattr(call_trace, "MOST_LIVE", len(guard.current().register.live) + 8)
    kept = []

    def use_up():
        for _ in range(8):
            kept.append(mz.ShardingConfig(comm=MPI.COMM_SELF))
            _ = kept[-1].grid

    with pytest.raises(StateError, match=r"communicators of mpizero are open .* close models and configurations"):
        use_up()
    monkeypatch.undo()
    for config in kept:
        config.close()
    with mz.ShardingConfig(comm=MPI.COMM_SELF) as config:  # there is room again
        assert config.grid.world.size == 1
