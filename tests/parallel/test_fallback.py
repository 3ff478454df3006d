"""A node without enough shared memory: all ranks keep private copies, with a message and the same bits."""

from __future__ import annotations

from typing import Any

import pytest

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.parallel.models import STRATEGIES, gpt, part, tokens


def trained(comm: Any, strategy: str) -> tuple[str, int]:
    x, y = tokens(6)
    with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
        model, _ = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy=strategy, config=config)
        with model:
            for _ in range(2):
                model.train(*part(comm, x, y))
            return model.parameters_sha256(), model.metadata().ranks_per_node


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_full_node_makes_all_ranks_keep_their_own_copies(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = run_in_threads(3, lambda comm: trained(comm, strategy))
    monkeypatch.setattr(mz.InMemoryCommunicator, "shared_space", lambda self: 1000 if self.rank == 2 else None)
    private = run_in_threads(3, lambda comm: trained(comm, strategy))
    assert {ranks for _, ranks in shared} == {3}
    assert {ranks for _, ranks in private} == {1}
    assert {digest for digest, _ in shared} == {digest for digest, _ in private}
    assert capsys.readouterr().err.count("every rank keeps its own copy") == 1
