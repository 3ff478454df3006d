"""How much of a gradient travels at once changes messages and times, never a bit; and how its size is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, MpizeroError
from mpizero.sharding import grad_reduce
from mpizero.sharding.config import elements_of
from mpizero.sharding.grad_reduce import ROUNDS, SIZES, WARM, fastest, worth_trying
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, gpt, part, sharded, tokens
from tests.parallel.parallel_layouts import of_first, with_traps

#: Sizes that cut the gradients of a small model: 16, 64 and 256 float32 values.
SMALL = tuple(elements * 4 / 2**20 for elements in (16, 64, 256))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_reduce, "SIZES", SMALL)


def trained(comm: Any, strategy: str, steps: int = 2, layers: int = 2, **settings: Any) -> tuple[str, int, float]:
    """The hash after some steps, the messages of gradients, and the bucket at the end."""
    model, _ = sharded(strategy, comm, gpt(layers=layers), micro_batch=1, **settings)
    with model:
        for seed in range(steps):
            model.train(*part(comm, *tokens(6, seed)))
        told = model.last_step.bucket_mb
        by_tag = model.engine.grid.peers.counters.messages_by_tag
        return model.parameters_sha256(), by_tag["gradients"] + by_tag["unit gradients"], told


# ---------------------------------------------------------------------- a given size


@pytest.mark.parametrize(("strategy", "memory"), [*zip(STRATEGIES, (*MEMORIES[1:], *MEMORIES[:0:-1]), strict=True)])
def test_smaller_buckets_are_more_messages_of_the_same_bits(strategy: str, memory: dict[str, Any]) -> None:
    """Rows (DDP, ZeRO-1) and waves (ZeRO-2, ZeRO-3) with each kind of memory that sends messages."""
    found = [
        run_in_threads(4, lambda c, s=size: trained(c, strategy, layers=1, bucket_mb=s, **memory)) for size in SMALL
    ]
    plain = run_in_threads(4, lambda c: trained(c, strategy, layers=1, **memory))
    assert len({sha256 for ranks in (*found, plain) for sha256, *_ in ranks}) == 1
    for smallest, middle, largest, default in zip(*found, plain, strict=True):
        assert smallest[1] > middle[1] > largest[1] >= default[1]
        assert [row[2] for row in (smallest, middle, largest)] == list(SMALL)


def test_where_nothing_travels_there_is_no_bucket() -> None:
    for size in (None, 1, "auto"):
        assert trained(None, "zero2", bucket_mb=size)[1:] == (0, 0.0)
        assert {found[1:] for found in run_in_threads(2, lambda c, s=size: trained(c, "ddp", bucket_mb=s))} == {
            (0, 0.0)
        }


@pytest.mark.parametrize("size", [0, -1, True, "4", "tuned", float("nan"), float("inf"), 1e9])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_mb"):
        mz.ShardingConfig(bucket_mb=size)


def test_compressed_messages_have_one_size() -> None:
    for size in (1, "auto"):
        with pytest.raises(ConfigError, match="bucket_mb.*gradient_compression"):
            mz.ShardingConfig(bucket_mb=size, gradient_compression="int8")
        with pytest.raises(ConfigError, match="bucket_mb"):
            mz.GradientCompressionOptimizer(mz.AdamW(), mz.ShardingConfig(bucket_mb=size), compression="bf16")


# ---------------------------------------------------------------------- a size that is found


def test_sizes_that_hold_more_than_all_are_not_tried() -> None:
    assert worth_trying(1, 4) == SIZES[:1]
    assert worth_trying(elements_of(1.0, 4), 4) == (0.25, 0.5, 1.0)
    assert worth_trying(elements_of(1.0, 4) + 1, 4) == (0.25, 0.5, 1.0, 2.0)
    assert worth_trying(elements_of(1.0, 4), 8) == (0.25, 0.5, 1.0, 2.0)
    assert worth_trying(10**12, 4) == SIZES


def test_the_smallest_of_those_that_are_close_to_the_fastest_is_taken() -> None:
    sizes = (1.0, 2.0, 4.0)
    assert fastest(sizes, np.array([[9.0, 2.0, 1.0]])) == 4.0
    assert fastest(sizes, np.array([[9.0, 1.01, 1.0]])) == 2.0
    assert fastest(sizes, np.array([[9.0, 1.03, 1.0]])) == 4.0
    assert fastest(sizes, np.array([[9.0, 1.0, 1.5], [9.0, 8.0, 7.0], [0.9, 5.0, 5.0]])) == 1.0  # one calm moment


class Clock:
    """Seconds of steps that depend on the bucket, and on the rank."""

    def __init__(self, engine: Any, seconds: dict[float, float]) -> None:
        self.engine, self.seconds, self.now, self.read = engine, seconds, 0.0, 0

    def __call__(self) -> float:
        if self.read % 2:  # a step ends
            self.now += self.seconds[self.engine.exchange.bucket_mb]
        self.read += 1
        return self.now


def tuned(
    comm: Any, strategy: str, seconds: Sequence[Sequence[float]], **memory: Any
) -> tuple[list[float], float, int]:
    """The bucket of each step until one is chosen, that, and the bytes of scratch that are left."""
    model, _ = sharded(strategy, comm, gpt(layers=1), micro_batch=1, bucket_mb="auto", **memory)
    with model:
        engine, used, sent = model.engine, [], 0
        before = engine.grid.bytes_sent
        engine.tuner._clock = Clock(engine, dict(zip(SMALL, seconds[comm.rank], strict=True)))
        while not (tried := getattr(model.last_step, "buckets_tried", ())):
            engine.tuner._clock.read = 0
            model.train(*part(comm, *tokens(6)))
            used.append(engine.exchange.bucket_mb)
            sent += model.last_step.bytes_sent
        assert tried == SMALL
        assert sent == engine.grid.bytes_sent - before
        return used, model.last_step.bucket_mb, engine.memory.private_bytes["exchange buffers"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_every_size_is_tried_in_turn_and_the_slowest_rank_decides(strategy: str) -> None:
    seconds = ([1.0, 1.5, 3.0], [5.0, 1.2, 1.0])  # alone, rank 0 would take the first, rank 1 the last
    turns = [SMALL[0]] * WARM + list(SMALL) * ROUNDS
    for used, chosen, left in run_in_threads(2, lambda comm: tuned(comm, strategy, seconds, **PRIVATE)):
        assert used[:-1] == turns[:-1]
        assert used[-1] == chosen == SMALL[1]
        assert left == 0


def interrupted(comm: Any) -> tuple[int, int, str]:
    """Trials that count, of steps of which some are skipped, fail, or have other batches, and the hash."""
    switch: dict[str, Any] = {}
    model, _ = sharded(
        "zero2", comm, with_traps(gpt(layers=1), {"blocks.0": switch}), micro_batch=1, bucket_mb="auto", **PRIVATE
    )
    with model:
        tuner = model.engine.tuner
        mine = part(comm, *tokens(6))
        for what in ("infinite", "weights"):
            model.train(*mine)
            switch.update(what=what, first=0)
            if what == "infinite":
                model.train(*mine)
                assert model.last_step.skipped
            else:
                with pytest.raises((ArithmeticError, MpizeroError), match="trap in"):
                    model.train(*mine)
            switch.clear()
            model.predict(mine[0])
            model.evaluate(*mine)
            model.compute_gradients(*mine)
            model.train(*part(comm, *tokens(4)))
        return tuner._trial, len(tuner._sizes), model.parameters_sha256()


@pytest.mark.usefixtures("small")
def test_steps_that_do_not_compare_are_tried_again() -> None:
    found = run_in_threads(2, interrupted)
    assert {(trial, sizes) for trial, sizes, _ in found} == {(2 - WARM, len(SMALL))}
    assert len({sha256 for *_, sha256 in found}) == 1


@pytest.mark.mpi
def test_tuning_changes_no_bit_and_all_ranks_settle_on_one_size(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tuple(4 * size for size in SMALL)
    monkeypatch.setattr(grad_reduce, "SIZES", sizes)
    monkeypatch.setattr(grad_reduce, "ROUNDS", 1)
    steps = WARM + len(sizes) + 1
    plain, _, _ = of_first(world, lambda: trained(None, "ddp", steps))
    cases = list(zip(STRATEGIES, (*MEMORIES[1:], *MEMORIES[1:]), strict=True))
    for strategy, memory in cases[int(world.size in (3, 8)) :: 2]:
        auto, _, chosen = trained(world, strategy, steps, bucket_mb="auto", **memory)
        told = world.allgather_object(chosen)
        known = {0.0} if max(told) == 0 else set(sizes)
        parallel_assert(world, auto == plain and len(set(told)) == 1 and chosen in known, f"{strategy} {memory} {told}")
