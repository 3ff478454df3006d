"""How much of a gradient travels at once changes messages and times, never a bit."""

from __future__ import annotations

from typing import Any

import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, STRATEGIES, gpt, part, sharded, tokens

#: Sizes that cut the gradients of a small model: 16, 64 and 256 float32 values.
SMALL = tuple(elements * 4 / 2**20 for elements in (16, 64, 256))


def trained(comm: Any, strategy: str, steps: int = 2, layers: int = 2, **settings: Any) -> tuple[str, int, float]:
    """The hash after some steps, the messages of gradients, and the bucket at the end."""
    model, _ = sharded(strategy, comm, gpt(layers=layers), micro_batch=1, **settings)
    with model:
        for seed in range(steps):
            model.train(*part(comm, *tokens(6, seed)))
        told = model.last_step.bucket_mb
        by_tag = model.engine.grid.peers.counters.messages_by_tag
        return model.parameters_sha256(), by_tag["gradients"] + by_tag["unit gradients"], told


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
    for size in (None, 1):
        assert trained(None, "zero2", bucket_mb=size)[1:] == (0, 0.0)
        assert {found[1:] for found in run_in_threads(2, lambda c, s=size: trained(c, "ddp", bucket_mb=s))} == {
            (0, 0.0)
        }


@pytest.mark.parametrize("size", [0, -1, True, "4", "auto", float("nan"), float("inf"), 1e9])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_mb"):
        mz.ShardingConfig(bucket_mb=size)


def test_compressed_messages_have_one_size() -> None:
    with pytest.raises(ConfigError, match="bucket_mb.*gradient_compression"):
        mz.ShardingConfig(bucket_mb=1, gradient_compression="int8")
    with pytest.raises(ConfigError, match="bucket_mb"):
        mz.GradientCompressionOptimizer(mz.AdamW(), mz.ShardingConfig(bucket_mb=1), compression="bf16")
