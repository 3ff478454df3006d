"""A U-Net has the bits of one process under every strategy, and cut into stages, whose messages are trees of fields."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.parallel_layouts import Case, Way, trained, trained_alone


def net(**settings: Any) -> mz.nn.UNet:
    return mz.nn.UNet(2, 3, width=4, levels=2, groups=2, **{"dropout": 0.2, "refine": "linear", **settings})


def fields(batches: int, samples: int) -> list[tuple[Any, Any]]:
    """Fields of odd extents."""
    rng = np.random.default_rng(2)
    return [
        (rng.normal(size=(samples, 7, 5, 2)).astype("f4"), rng.normal(size=(samples, 7, 5, 3))) for _ in range(batches)
    ]


CASES = {
    "clip, ema": Case(net, batches=fields(2, 7), config={"clip": 0.5, "ema": 0.9}),
    "checkpointed": Case(
        lambda: net(activation_checkpointing=True, refine="transposed"), batches=fields(2, 7), config={"accumulate": 2}
    ),
}


@cache
def alone(name: str) -> Any:
    return trained_alone(CASES[name])


def test_activations_that_are_computed_again_change_no_bit() -> None:
    again = Case(lambda: net(activation_checkpointing=True), batches=fields(2, 7), config=CASES["clip, ema"].config)
    assert trained_alone(again) == alone("clip, ema")


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (1, Way(zero=3)),
        (2, Way(zero=0)),
        (2, Way(zero=3)),
        (3, Way(zero=1)),
        (3, Way(zero=2)),
        (2, Way(2)),
        (4, Way(2, zero=2)),
        (3, Way(3, zero=0, schedule="gpipe")),
    ],
)
def test_every_strategy_and_stage_has_the_bits_of_one_process(ranks: int, way: Way) -> None:
    name = list(CASES)[(ranks + way.zero) % 2]
    assert run_in_threads(ranks, lambda comm: trained(CASES[name], comm, way)) == [alone(name)] * ranks


@pytest.mark.parametrize(("axis", "why"), [("tensor", "nothing to split over 2 ranks"), ("context", "block 'down.0'")])
def test_a_u_net_is_split_by_its_blocks_alone(axis: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        run_in_threads(2, lambda comm: mz.distribute(net(), mz.SGD(0.1), "zero1", mesh=mz.Mesh(comm, **{axis: 2})))
    assert len(str(raised.value).splitlines()) == 1
