"""Bytes on the wire: what a rank sends in a step is what the partition says, to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import reduce as exact
from mpizero.layout import Partition
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, gpt, mlp, part, sharded, tokens

UNITS = (7 * 11 + 11, 11 * 5 + 5, 5 * 3 + 3)  # primes: no rank count divides them


def batch(size: int) -> Any:
    rng = np.random.default_rng(1)
    return rng.normal(size=(size, 7)).astype(np.float32), rng.integers(0, 3, size)


def sent(comm: Any, strategy: str, **settings: Any) -> tuple[int, Any]:
    """Bytes of the second of two steps with one grain a rank."""
    model, _ = sharded(strategy, comm, mlp(features=7, hidden=(11, 5)), micro_batch=1, **settings)
    with model:
        for _ in range(2):
            model.train(*part(comm, *batch(comm.size)))
        assert model.last_step.bytes_sent == model.metadata().bytes_sent_last_step
        return model.last_step.bytes_sent, model.get_parameters()


def scalars(n: int) -> int:
    """The two small messages of a step: four int64 of sizes and types, four float64 of a grain and the rate."""
    return (4 + 4 + 1) * 8 * (n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_private_memory_sends_2p_and_stage_3_sends_3p(strategy: str, n: int) -> None:
    units = [sum(UNITS)] if strategy in ("ddp", "zero1") else list(UNITS)
    total, everyone = 0, run_in_threads(n, lambda comm: sent(comm, strategy, **PRIVATE))
    for rank, (found, _) in enumerate(everyone):
        own = sum(Partition(unit, n).sizes()[rank] for unit in units)
        reduce = sum(UNITS) - own  # the parts of others, of one partial sum
        gather = own * (n - 1)  # the own part, to everybody
        elements = reduce + (2 if strategy == "zero3" else 1) * gather
        assert found == 4 * elements + scalars(n)
        total += elements
    assert total == (3 if strategy == "zero3" else 2) * sum(UNITS) * (n - 1)


def test_inside_one_shared_node_nothing_is_sent_but_scalars() -> None:
    for strategy in STRATEGIES:
        for found, _ in run_in_threads(4, lambda comm, s=strategy: sent(comm, s)):
            assert found == scalars(4)


def test_the_first_step_without_an_optimizer_does_not_count_that_ranks_agree_on_plain_sgd() -> None:
    def first(comm: Any, optimizer: Any) -> int:
        config = mz.ShardingConfig(comm=comm, micro_batch=1)
        with config, mz.DDPModel(gpt(), config, optimizer=optimizer) as model:
            model.train(*part(comm, *tokens(2)))
            return model.last_step.bytes_sent

    plain, given = (run_in_threads(2, lambda comm, o=o: first(comm, o)) for o in (None, mz.SGD(lr=0.01)))
    assert plain == given


def test_between_nodes_the_bytes_fall_by_the_ranks_of_a_node() -> None:
    flat = sum(found for found, _ in run_in_threads(4, lambda comm: sent(comm, "zero1", **PRIVATE)))
    nodes = sum(found for found, _ in run_in_threads(4, lambda comm: sent(comm, "zero1", ranks_per_node=2)))
    # Two grains a node are added before they travel: 2 P (2 - 1) / 2 elements a pair of peers, each for half of P.
    assert flat - 4 * scalars(4) == 4 * 2 * sum(UNITS) * 3
    assert nodes - 4 * scalars(4) == 4 * 2 * sum(UNITS)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_compressed_gradients_take_half_the_bytes_and_stay_close(strategy: str) -> None:
    def step(comm: Any, kind: str | None) -> Any:
        settings = {"micro_batch": 1, "gradient_compression": kind, **PRIVATE}
        model, _ = sharded(strategy, comm, mlp(features=7, hidden=(11, 5)), mz.SGD(lr=1.0), **settings)
        with model:
            model.train(*part(comm, *batch(comm.size)))
            # fp16 may overflow, so the norm of the sum is looked at: a few float64 partial sums.
            norms = model.engine.updater.trees._all_sums[0][comm.rank] * 8 * (comm.size - 1) if kind == "fp16" else 0
            return model.last_step.bytes_sent - norms, model.get_parameters(), model.shard_size

    plain = run_in_threads(3, lambda comm: step(comm, None))
    for kind, precision in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        packed = run_in_threads(3, lambda comm, k=kind: step(comm, k))
        for (before, exactly, own), (after, nearly, _) in zip(plain, packed, strict=True):
            assert before - after == 2 * (sum(UNITS) - own)
            np.testing.assert_allclose(nearly, exactly, atol=precision)
            assert not np.array_equal(nearly, exactly)


@pytest.mark.mpi
def test_messages_in_many_pieces_have_the_bits_of_one(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold unequal numbers of partial sums (10 grains), and must still make equally many turns."""
    x, y = tokens(10)
    hashes = set()
    monkeypatch.setattr(exact, "EXCHANGE_ELEMENTS", 64)
    layouts = [(world, *pair) for pair in zip(STRATEGIES, (*MEMORIES[1:], *MEMORIES[1:]), strict=True)]
    for comm, strategy, memory in ((None, "ddp", {}), *layouts):
        model, _ = sharded(strategy, comm, gpt(layers=1), micro_batch=1, **memory)
        with model:
            model.train(*part(comm, x, y))
            hashes.add(model.parameters_sha256())
    assert len(hashes) == 1
