from __future__ import annotations

import pytest

from tests.support.simulated import ASKED, simulate_gpus

if ASKED:
    simulate_gpus()


@pytest.fixture
def in_turn(monkeypatch):
    """Let the threads of simulated blocks run one after the other, which costs a quarter."""
    from tests.cuda.in_turn import simulate_in_turn  # not where numba has no simulator

    simulate_in_turn(monkeypatch.setattr)
