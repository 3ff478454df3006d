"""Messages of gradients: bytes are what the partition says, sizes change no bit, and plans of them do not pile up."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import reduce as exact
from mpizero.errors import ConfigError
from mpizero.layout import Partition
from mpizero.sharding.grad_reduce import CACHED_PLANS
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, gpt, mlp, part, points, sharded, tokens

UNITS = (7 * 11 + 11, 11 * 5 + 5, 5 * 3 + 3)  # primes: no rank count divides them


def batch(size: int) -> Any:
    rng = np.random.default_rng(1)
    return rng.normal(size=(size, 7)).astype(np.float32), rng.integers(0, 3, size)


def sent(comm: Any, strategy: str, **settings: Any) -> tuple[int, Any]:
    """Bytes of the second of two steps with one grain a rank."""
    with sharded(strategy, comm, mlp(features=7, hidden=(11, 5)), micro_batch=1, **settings) as model:
        for _ in range(2):
            model.train(*part(comm, *batch(comm.size)))
        assert model.last_step.bytes_sent == model.metadata().bytes_sent_last_step
        return model.last_step.bytes_sent, model.get_parameters()


def scalars(n: int) -> int:
    """The two small messages of a step: four int64 of sizes and types, four float64 of a grain and the rate."""
    return (4 + 4 + 1) * 8 * (n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_private_memory_sends_2p_and_stage_3_sends_3p(n: int) -> None:
    for strategy in STRATEGIES:
        units = [sum(UNITS)] if strategy == "ddp" else list(UNITS)
        for rank, (found, _) in enumerate(run_in_threads(n, lambda comm, s=strategy: sent(comm, s, **PRIVATE))):
            own = sum(Partition(unit, n).sizes()[rank] for unit in units)
            reduce = sum(UNITS) - own  # the parts of others, of one partial sum
            gather = own * (n - 1)  # the own part, to everybody
            assert found == 4 * (reduce + (2 if strategy == "zero3" else 1) * gather) + scalars(n), (strategy, rank)


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


#: Sizes that cut the gradients of a small model: 16, 64 and 256 float32 values.
SMALL = tuple(elements * 4 / 2**20 for elements in (16, 64, 256))


def in_buckets(comm: Any, strategy: str, **settings: Any) -> tuple[str, int, float]:
    """The hash after two steps, the messages of gradients, and the bucket at the end."""
    with sharded(strategy, comm, gpt(layers=1), micro_batch=1, **settings) as model:
        for seed in range(2):
            model.train(*part(comm, *tokens(10, seed)))
        by_tag = model._engine.grid.gradients.counters.messages_by_tag
        return model.parameters_sha256(), by_tag["gradients"] + by_tag["unit gradients"], model.last_step.bucket_mb


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "memory"), [*zip(STRATEGIES, (*MEMORIES[1:], *MEMORIES[:0:-1]), strict=True)])
def test_smaller_buckets_are_more_messages_of_the_same_bits(strategy: str, memory: dict[str, Any]) -> None:
    """Rows (DDP, ZeRO-1) and waves (ZeRO-2, ZeRO-3) with each kind of memory that sends messages."""
    sizes = [*({"bucket_mb": size} for size in SMALL), {}]
    found = [run_in_threads(4, lambda c, s=size: in_buckets(c, strategy, **s, **memory)) for size in sizes]
    assert {sha256 for ranks in found for sha256, *_ in ranks} == {in_buckets(None, "ddp")[0]}
    for smallest, middle, largest, default in zip(*found, strict=True):
        assert smallest[1] > middle[1] > largest[1] >= default[1]
        assert (smallest[2], middle[2], largest[2]) == SMALL


@pytest.mark.parametrize("size", [None, 1])
def test_where_nothing_travels_there_is_no_bucket(size: Any) -> None:
    assert in_buckets(None, "zero2", bucket_mb=size)[1:] == (0, 0.0)
    assert [found[1:] for found in run_in_threads(2, lambda c: in_buckets(c, "ddp", bucket_mb=size))] == [(0, 0.0)] * 2


def test_compressed_messages_have_one_size() -> None:
    with pytest.raises(ConfigError, match="bucket_mb.*gradient_compression"):
        mz.ShardingConfig(bucket_mb=1, gradient_compression="int8")
    with pytest.raises(ConfigError, match="bucket_mb"):
        mz.GradientCompressionOptimizer(mz.AdamW(), mz.ShardingConfig(bucket_mb=1), compression="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_in_many_pieces_have_the_bits_of_one(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks hold unequal numbers of partial sums of 10 grains, and must still make equally many turns."""
    expected = in_buckets(None, "ddp")[0]
    monkeypatch.setattr(exact, "EXCHANGE_ELEMENTS", 64)
    for memory in MEMORIES[1:]:
        assert {sha for sha, *_ in run_in_threads(3, lambda c, m=memory: in_buckets(c, strategy, **m))} == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_plans_that_are_kept_do_not_grow_with_the_number_of_sizes(strategy: str) -> None:
    sizes = CACHED_PLANS + 4

    def run(comm: Any) -> Any:
        model = sharded(strategy, comm, mlp(hidden=()), micro_batch=1, **PRIVATE)
        x, y = points(4 * sizes)
        held = []
        with model:
            model.reserve(len(x))
            for first in (sizes, 2 * sizes):
                for size in range(first, first + sizes):
                    own = slice(None if comm.rank else 0, size if comm.rank == 0 else 0)
                    model.train(x[own], y[own])
                comm.barrier()
                if comm.rank == 0:
                    gc.collect()
                    held.append(Counter(type(found).__name__ for found in gc.get_objects()))
                comm.barrier()
        return held

    early, late = run_in_threads(2, run)[0]
    assert all(count < sizes for name, count in (late - early).items() if name.endswith("Plan"))
    assert late["RowsPlan"] + late["RoundPlan"] > 0
