"""The default grains of a model of PyTorch or JAX: from the batch and the module alone, and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.testing import run_in_threads  # noqa: E402
from tests.peers.placing import placed  # noqa: E402

RNG = np.random.default_rng(0)
TOTAL = nn.MSELoss(reduction="sum")


def mlp() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutions() -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.1), nn.Conv2d(8, 3, 3, padding=1))


def samples(count: int, *shape: int) -> Any:
    return RNG.normal(size=(count, *shape)).astype(np.float32)


def plain(module: Any, **settings: Any) -> Any:
    """Place a module with plain descent."""
    return placed(TorchModel(module, TOTAL), "self", optimizer=mz.SGD(0.1), **{"micro_batch": None} | settings)


def sizes(model: Any, x: Any, y: Any, batch: int, **settings: Any) -> int:
    with mz.distribute(model, mz.SGD(0.1), config=mz.ShardingConfig(comm="self", **settings)) as placed:
        assert placed.grain_size(batch, (x, y)) == placed.grain_size(batch)
        return int(placed.grain_size(batch))


def test_a_module_with_more_work_a_sample_has_smaller_grains() -> None:
    model = TorchModel(convolutions, TOTAL)
    found = [sizes(model, x, x, 128) for x in (samples(2, 3, size, size) for size in (8, 64, 512))]
    assert found[0] == 32
    assert found[0] >= found[1] > found[2] >= 1
    assert sizes(model, x := samples(2, 3, 512, 512), x, 128, micro_batch=5) == 5


def test_every_number_of_ranks_finds_the_grains_of_one_process_and_its_bits() -> None:
    x, y = samples(19, 3), samples(19, 2)

    def body(comm: Any) -> tuple[int, str]:
        own = slice(len(x) * comm.rank // comm.size, len(x) * (comm.rank + 1) // comm.size)
        with mz.distribute(TorchModel(mlp, TOTAL), mz.SGD(0.1), strategy="zero2", mesh=mz.Mesh(comm)) as placed:
            for _ in range(6):
                placed.train(x[own], y[own])
            return placed.grain_size(19), str(placed.parameters_sha256())

    found = {one for ranks in (1, 3, 8) for one in run_in_threads(ranks, body)}
    assert len(found) == 1
    assert found.pop()[0] == 4


def test_counting_leaves_no_trace() -> None:
    x, before = samples(16, 3, 6, 6), torch.get_rng_state()

    def trained(micro_batch: int | None) -> str:
        torch.manual_seed(1)
        with plain(convolutions(), micro_batch=micro_batch) as model:
            for _ in range(8):
                model.train(x, x)
            assert model.grain_size(16) == 4
            return str(model.parameters_sha256())

    assert trained(None) == trained(4)
    torch.set_rng_state(before)


def test_a_module_that_does_not_run_on_zeros_has_four_grains() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(3))

        def forward(self, x: Any) -> Any:
            return x @ torch.linalg.inv(self.matrix)

    x = samples(64, 3)
    assert sizes(TorchModel(Inverse(), TOTAL), x, x, 64) == 16
    with mz.distribute(TorchModel(Inverse(), TOTAL), mz.SGD(0.01), mesh=mz.Mesh("self")) as placed:
        assert np.isfinite(placed.train(x, x))


def test_a_resumed_training_keeps_its_grains_whatever_samples_come_first(tmp_path: Path) -> None:
    large, small = samples(16, 3, 64, 64), samples(16, 3, 8, 8)
    with mz.distribute(TorchModel(convolutions, TOTAL), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.train(large, large)
        placed.save_model(tmp_path / "saved")
        size = placed.grain_size(1024)
        placed.train(small, small)
        assert placed.grain_size(1024) == size < sizes(TorchModel(convolutions, TOTAL), small, small, 1024)
        whole = placed.parameters_sha256()
    with mz.distribute(TorchModel(convolutions, TOTAL), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.load_model(tmp_path / "saved")
        placed.train(small, small)
        assert placed.grain_size(1024) == size
        assert placed.parameters_sha256() == whole


def test_batches_know_the_grains_before_the_first_step() -> None:
    source = mz.data.ArraySource(samples(64, 3), samples(64, 2))

    def read(comm: Any) -> list[int]:
        placed = mz.distribute(TorchModel(mlp, TOTAL), mz.SGD(0.1), mesh=mz.Mesh(comm))
        with placed, mz.data.batches(source, placed, 32, steps=2) as stream:
            return [len(x) for x, _ in stream]

    assert run_in_threads(3, read) == [[16, 16], [8, 8], [8, 8]]  # two grains of 8 samples, one, and one


def test_the_first_step_names_the_grains_and_too_few_samples_of_batch_norms(capsys: pytest.CaptureFixture[str]) -> None:
    def told(module: Any, batch: int, **settings: Any) -> str:
        x, y = samples(batch, 3), samples(batch, 2)
        with plain(module, **settings) as m:
            for _ in range(3):
                m.train(x, y)
        return capsys.readouterr().err

    def normed() -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    assert told(mlp, 32).count("32 samples a step in 4 grains of 8 (by default") == 1
    assert "samples a step" not in told(mlp, 32, micro_batch=8)
    line = "the batch norm '1' takes mean and variance from micro-batches of 2"
    assert told(normed, 8).count(line) == told(normed, 32, micro_batch=2).count(line) == 1
    assert line not in told(normed, 32)


def test_passes_are_timed_beside_those_of_one_sample_without_effect_on_the_bits() -> None:
    x, y = samples(16, 3), samples(16, 2)

    def penalized(prediction: Any, target: Any, module: Any) -> Any:
        return TOTAL(prediction, target) + len(target) * module[0].weight.square().sum()

    for loss in (TOTAL, penalized):
        model = TorchModel(mlp, loss)
        with mz.distribute(model, mz.SGD(0.01), mesh=mz.Mesh("self")) as placed:
            for _ in range(3):
                placed.train(x, y)
        seconds = model.times.seconds
        assert seconds is not None
        assert seconds.samples == 4
        assert seconds.one > 0
        assert seconds.all > 0


def test_models_of_jax_have_such_grains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    from mpizero.adapters.jax import JaxModel
    from mpizero.adapters.jax import blocks as compiled_loss

    monkeypatch.setattr(compiled_loss, "_MOST_COMPILING", 1e9)  # however busy the machine is

    weights = {"a": samples(3, 4), "b": samples(4, 2)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return ((jax.numpy.tanh(x @ p["a"]) @ p["b"] - y) ** 2).sum()

    x, y = samples(64, 3), samples(64, 2)
    box = JaxModel(weights, loss)
    assert sizes(box, x, y, 64) == 16
    with mz.distribute(box, mz.SGD(0.001), mesh=mz.Mesh("self")) as placed:
        for _ in range(3):
            placed.train(x, y)
    assert box.times.seconds is not None
    assert box.times.seconds.samples == 16
    assert box.compilations == 1
    blocks = [
        ({"w": weights["a"]}, lambda p, x: jax.numpy.tanh(x @ p["w"])),
        ({"w": weights["b"]}, lambda p, x: x @ p["w"]),
    ]
    model = JaxModel(None, lambda p, y: ((p - y) ** 2).sum(), blocks=blocks)
    assert sizes(model, x, y, 64) == 16
    wide = np.zeros((8, 64, 64, 3), np.float32)
    deep = JaxModel(
        {"k": samples(3, 3, 3, 32), "l": samples(3, 3, 32, 3)},
        lambda p, x, y: (
            jax.lax.conv_general_dilated(
                jax.lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
                p["l"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ) - y
        ).sum(),
    )  # fmt: skip
    assert 1 <= sizes(deep, wide, wide, 256) < 64


def test_ranks_that_know_other_samples_do_not_train_with_other_grains() -> None:
    def body(comm: Any) -> str:
        with mz.distribute(TorchModel(convolutions, TOTAL), mz.SGD(0.1), mesh=mz.Mesh(comm)) as placed:
            if comm.rank == 1:
                placed.grain_size(64, (samples(1, 3, 512, 512), samples(1, 3, 512, 512)))
            x = samples(32, 3, 8, 8)
            with pytest.raises(
                mz.errors.ConfigError, match=r"the samples of a default grain.* on ranks 0, 2, 1 on rank 1"
            ):
                placed.train(x, x)
            return "refused"

    assert run_in_threads(3, body) == ["refused"] * 3


def test_samples_that_are_no_pair_or_not_equally_many_are_refused() -> None:
    with mz.distribute(TorchModel(mlp, TOTAL), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        for given, message in (
            (samples(4, 3), "tuple"),
            ((samples(4, 3),), "tuple"),
            ((samples(4, 3), samples(3, 2)), "4.*3"),
        ):
            with pytest.raises(mz.errors.MpizeroError, match=message):
                placed.grain_size(32, given)
        assert placed.grain_size(32) == 8
