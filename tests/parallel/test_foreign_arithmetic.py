"""Whose bits a training has: every CPU's, or this one's, because something else than this library computes in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.kernels import matmul
from mpizero.nn import Sequential
from mpizero.sharding.exactness import bits, foreign_arithmetic
from mpizero.testing import run_in_threads
from tests.parallel.parallel_layouts import Chain


@dataclass(frozen=True)
class Doubled(mz.nn.Layer):
    """A layer of a user."""

    def forward(self, params: Any, x: Any, run: Any) -> tuple[Any, Any]:
        return 2 * x, None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> tuple[Any, Any]:
        return 2 * dy, None


def own_rate(step: int) -> float:
    return 0.1


MLP = mz.nn.MLP(3, [4], 2)
WITH_OWN_LAYER = Chain({"first": Sequential({"linear": mz.nn.Linear(3, 2), "mine": Doubled()})})
FUNCTION = mz.FunctionModel({"w": np.zeros(3)}, lambda parameters, batch: (1.0, {"w": np.ones(3)}, 1.0))
HERE = __name__


@pytest.mark.parametrize(
    ("model", "optimizer", "expected"),
    [
        (MLP, mz.AdamW(lr=mz.optim.cosine(0.1, 5)), []),
        (mz.nn.GPT(8, 1, 2, 4, dropout=0.1), mz.Muon(), []),
        (mz.nn.GPT(8, 1, 2, 4), mz.LAMB(), []),
        (MLP, mz.SOAP(), ["SOAP uses NumPy's products and LAPACK's eigh and qr"]),
        (MLP, mz.SGD(own_rate), [f"{HERE}.own_rate computes the learning rate"]),
        (FUNCTION, mz.SGD(0.1), ["a function of yours computes the model"]),
        (WITH_OWN_LAYER, None, [f"{HERE}.Doubled computes block 'first'"]),
    ],
)
def test_what_computes_besides_this_library_is_named(model: Any, optimizer: Any, expected: list[str]) -> None:
    assert foreign_arithmetic(model, "cpu", optimizer) == expected


def test_a_gpu_has_bits_of_its_own() -> None:
    assert bits(foreign_arithmetic(MLP, "cuda")) == "this CPU, because a GPU computes"


@pytest.mark.parametrize(("name", "why"), [("numpy", ["NumPy multiplies (MPIZERO_BLAS=numpy)"]), ("", [])])
def test_another_blas_is_named(name: str, why: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIZERO_BLAS", name)
    monkeypatch.setattr(matmul, "library", matmul.library.__wrapped__)
    assert foreign_arithmetic(MLP) == why


def test_a_product_that_the_kernel_does_not_make_is_counted_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = matmul.KernelProducts()
    monkeypatch.setattr(matmul, "library", lambda: kernel)
    for _ in range(3):
        matmul.matmul(np.ones((2, 3), np.float16), np.ones((3, 4), np.float16))
    what = "NumPy multiplies float16 with 2 axes by float16 with 2"
    assert kernel.by_numpy == {what: 3}
    assert capsys.readouterr().err.count("which mpizero's kernel does not: the bits are this CPU's") == 1
    assert foreign_arithmetic(MLP) == [what]


def test_metadata_says_whose_bits_a_model_has() -> None:
    with mz.distribute(MLP, mz.AdamW()) as model:
        assert model.metadata().bits == "every CPU"
    with mz.distribute(WITH_OWN_LAYER, mz.SOAP()) as model:
        own, soap = f"{HERE}.Doubled computes block 'first'", mz.SOAP.foreign_arithmetic
        assert model.metadata().bits == f"this CPU, because {own}; {soap}"


@pytest.mark.parametrize(("model", "told"), [(MLP, 0), (WITH_OWN_LAYER, 1)], ids=["own", "foreign"])
def test_a_job_of_two_types_of_cpu_is_warned_where_another_library_computes(
    model: Any, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = iter(["SkylakeX", "Haswell"])
    monkeypatch.setattr("mpizero.sharding.exactness.numpy_builds", lambda found: [f"openblas for {next(kinds)}"])

    def run(comm: mz.comm.Communicator) -> None:
        mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh(comm)).close()

    run_in_threads(2, run)
    found = capsys.readouterr().err
    assert found.count("use nodes of one kind") == told
    assert found.count("Doubled computes block 'first'") == told
