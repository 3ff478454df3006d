"""Blocks are tried without their products, and what they keep, send and put out is found all the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.kernels import matmul as products
from mpizero.nn.arrays import matmul
from mpizero.sharding.config import ShardingConfig, placement
from mpizero.sharding.partition import ParallelLayout
from mpizero.tools.plan import TrainingPlan, memory
from mpizero.tools.plan.memory import FakeArray
from tests.parallel.parallel_layouts import gpt

ZEROS = np.zeros((3, 4), np.float32).view(FakeArray)


def test_products_are_zeros_of_their_shape_and_other_operations_are_numpys() -> None:
    ones = np.ones((5, 2, 3), np.float32)
    product = ones @ ZEROS
    assert (type(product), product.shape, product.dtype) == (np.ndarray, (5, 2, 4), np.float32)
    assert not product.any()
    assert (ones[0].astype(np.float64) @ ZEROS).dtype == np.float64
    place = np.full((2, 4), np.nan, np.float32)
    assert np.matmul(ones[0], ZEROS, out=place) is place
    assert not place.any()
    total = ZEROS + 1.5
    assert type(total) is np.ndarray
    assert (total == 1.5).all()
    own = np.zeros(3).view(FakeArray)
    own += [1.0, 2.0, 3.0]
    assert own.sum() == 6.0
    assert (np.ones((2, 3)) @ own).tolist() == [6.0, 6.0]  # a vector: NumPy's


def test_a_product_into_such_an_array_leaves_it_alone() -> None:
    kept = np.full((4, 4), 7.0, np.float32).view(FakeArray)
    assert np.matmul(ZEROS.T, np.ones((3, 4), np.float32), out=kept) is kept
    assert (np.asarray(kept) == 7.0).all()


def test_products_that_cannot_be_are_errors_as_ever() -> None:
    with pytest.raises(ValueError, match="matmul"):
        np.ones((2, 5), np.float32) @ ZEROS
    with pytest.raises(ValueError, match=r"shape \(2, 4\) cannot be stored in an array of shape \(2, 3\)"):
        np.matmul(np.ones((2, 3), np.float32), ZEROS, out=np.empty((2, 3), np.float32))


def test_another_blas_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(least=0, memory=lambda a, b: None, product=pytest.fail)
    monkeypatch.setattr(products, "library", lambda: other)
    big = np.zeros((128, 128), np.float32)
    assert matmul(big, big.view(FakeArray)).shape == (128, 128)
    assert matmul(big.view(FakeArray), big).shape == (128, 128)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"context": 2}], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_blocks_keep_and_send_the_same_as_with_their_products(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], again: bool
) -> None:
    def tried() -> dict[str, memory.BlockTrial]:
        x = np.zeros((1, 6), np.int64)
        plan = TrainingPlan(
            model=gpt(dim=48, activation_checkpointing=again),
            optimizer=mz.AdamW(),
            config=ShardingConfig(micro_batch=2),
            row=placement("zero1"),
            parallel_layout=ParallelLayout(**layout),
            ranks=2,
            global_batch=4,
            x=x,
            y=x,
        )
        return plan.traffic(1).part.trials.of(2)

    without = tried()
    monkeypatch.setattr(memory, "FakeArray", np.ndarray)
    with_products = tried()
    assert without.keys() == with_products.keys()
    for name, found in without.items():
        assert found._replace(peaks=with_products[name].peaks) == with_products[name]
