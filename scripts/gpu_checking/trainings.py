"""Train small models on the GPU and on the CPU: equal losses, and checkpoints that go from one to the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mpizero as mz
from gpu_checking.report import Report, timed

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
#: Sizes of the GPT, on a GPU and in the simulator.
GPT = {"dim": 64, "layers": 2, "heads": 4, "sequence": 32, "vocabulary": 64}
SMALL_GPT = {"dim": 4, "layers": 1, "heads": 2, "sequence": 2, "vocabulary": 3}
#: Largest relative difference of losses on the GPU and on the CPU.
LIMITS = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 1e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Gate(mz.nn.Layer):
    """A layer of a user's own, which computes with the library of its arrays: the input times its sigmoid."""

    def forward(self, params: Any, x: Any, run: Any = None) -> tuple[Any, Any]:
        """Return the output, and the cache."""
        xp = mz.kernels.namespace(x)
        gate = 1 / (1 + xp.exp(-x))
        return x * gate, (x, gate)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input; there are no weights."""
        x, gate = cache
        return dy * (gate + x * gate * (1 - gate)), None


@dataclass(frozen=True)
class OwnModel:
    """A model of blocks of a user's own, with a layer of its own between two of the library's."""

    width: int
    loss: Any = field(default_factory=mz.nn.MeanSquaredError)
    seed: int = 4
    dtype: Any = np.dtype("float32")

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by name."""
        return {"in": mz.nn.Linear(7, self.width), "gate": Gate(), "out": mz.nn.Linear(self.width, 3)}


def gpt(small: bool, dtype: str = "float32", **settings: Any) -> mz.nn.GPT:
    """Return a GPT."""
    return mz.nn.GPT(**(SMALL_GPT if small else GPT), dtype=dtype, **settings)


def text(small: bool, samples: int) -> Batch:
    """Return a batch for :func:`gpt`: token ids, and the id that follows each."""
    sizes = SMALL_GPT if small else GPT
    steps = np.random.default_rng(7).integers(1, 3, (samples, sizes["sequence"] + 1))
    ids = np.cumsum(steps, axis=1) % sizes["vocabulary"]
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def numbers(samples: int, dtype: str = "float32") -> Batch:
    """Return a batch of samples of seven numbers, and three targets each."""
    x = np.random.default_rng(8).normal(size=(samples, 7)).astype(dtype)
    return x, np.cumsum(x, axis=1)[:, :3].copy()


@dataclass(frozen=True)
class Training:
    """Describe a training that runs on the GPU and on the CPU.

    ``precision`` names the row of LIMITS. ``on_gpu`` are settings on the GPU alone, such as products in 16 bits.
    """

    name: str
    model: Callable[[], Any]
    batch: Batch
    precision: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    scale: mz.DynamicLossScale | None = None
    optimizer: Callable[[], Any] = lambda: mz.AdamW(lr=1e-3)

    def run(self, device: str, steps: int) -> tuple[list[float], list[bool]]:
        """Train; return the losses, and which steps were skipped."""
        settings = {"micro_batch": max(1, len(self.batch[0]) // 4), "device": device} | dict(self.settings)
        settings |= self.on_gpu if device == "cuda" else {}
        losses, skipped = [], []
        with mz.ShardingConfig(comm="self", **settings) as config, mz.DDPModel(self.model(), config) as model:
            scale = self.scale if self.scale is not None else config.loss_scale(None)
            model._engine.bind(self.optimizer(), scale)
            for _ in range(steps):
                report = model._engine.train(*self.batch)
                losses.append(report.loss)
                skipped.append(report.skipped is not None)
        return losses, skipped


def trainings(small: bool) -> list[Training]:
    """Return the trainings that are compared."""
    words, wide = text(small, 2 if small else 16), numbers(4 if small else 64)
    width = 3 if small else 128
    overflowing = mz.DynamicLossScale(initial=2.0**120, largest=2.0**120)
    found = [
        Training("GPT", lambda: gpt(small), words),
        Training("GPT, dropout, clipping", lambda: gpt(small, dropout=0.1), words, settings={"clip": 0.5}),
        Training("GPT, tied", lambda: gpt(small, tied=True), words, optimizer=lambda: mz.LAMB(lr=1e-3)),
        Training("GPT, float64", lambda: gpt(small, "float64"), words, "float64"),
        Training("GPT, bfloat16 products", lambda: gpt(small), words, "bfloat16", {}, {"mixed_precision": "bfloat16"}),
        Training("GPT, float16 products", lambda: gpt(small), words, "float16", {}, {"mixed_precision": "float16"}),
        Training("MLP, relu", lambda: mz.nn.MLP(7, (width,), 3, activation="relu", task="regression"), wide),
        Training("MLP, silu, frozen", lambda: _frozen(width), wide),
        Training("own layer", lambda: OwnModel(width), wide, optimizer=lambda: mz.SGD(lr=1e-3, momentum=0.9)),
        Training("loss scale that overflows", lambda: OwnModel(width), (wide[0], 1e4 * wide[1]), scale=overflowing),
    ]
    return found[::3] if small else found


def _frozen(width: int) -> Any:
    return mz.nn.freeze(mz.nn.MLP(7, (width, width), 3, activation="silu", task="regression"), ["*.0.*"])


def losses(report: Report, small: bool) -> None:
    """Train on the GPU and on the CPU, and compare losses and skipped steps."""
    steps, taken = (2 if small else 20), []
    for training in trainings(small):
        with report.attempt(training.name):
            seconds, (on_gpu, skipped) = timed(training.run, "cuda", steps)
            on_cpu, skipped_there = training.run("cpu", steps)
            apart = max(abs(a - b) / abs(a) if a else abs(b) for a, b in zip(on_cpu, on_gpu, strict=True))
            limit = LIMITS[training.precision]
            told = f"losses differ by {apart:.1e} at most (limit {limit:.0e}), {sum(skipped)} of {steps} steps skipped"
            report.check(training.name, apart <= limit and skipped == skipped_there, f"{told}, {seconds:.1f} s")
            taken.append(apart / limit)
            if training.scale is not None:
                report.check(f"{training.name}: steps are skipped", any(skipped), sum(skipped))
    report.figure(
        "in short", f"{len(taken)} trainings of {steps} steps; {max(taken, default=np.nan):.2f} of the limits"
    )


# ---------------------------------------------------------------------------------------------- files


def files(report: Report, small: bool) -> None:
    """Save on the GPU, go on on the CPU, and back; save beside training."""
    batch = text(small, 2 if small else 8)
    with tempfile.TemporaryDirectory() as folder:
        saved = {}
        for number, device in enumerate(("cuda", "cpu", "cuda")):
            with (
                mz.ShardingConfig(comm="self", device=device, micro_batch=max(1, len(batch[0]) // 2)) as config,
                mz.distribute(gpt(small), mz.AdamW(lr=1e-3), strategy="ddp", config=config) as model,
            ):
                if number:
                    model.load_model(f"{folder}/{number - 1}")
                    told = f"loaded for {device}: parameters and state of the file"
                    report.check(told, _state(model) == saved[number - 1], _state(model)[:12])
                model.train(*batch)
                model.save_model(f"{folder}/{number}")
                saved[number] = _state(model)
        _beside(report, small, batch, Path(folder))
    report.figure("in short", "GPU to CPU to GPU; one save beside training")


def _state(model: Any) -> str:
    """Return a hash of parameters and optimizer state."""
    import hashlib

    digest = hashlib.sha256()
    for array in model._checkpoint_arrays():
        digest.update(array.path.encode())
        for first, values in array.pieces:
            digest.update(first.to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()


def _beside(report: Report, small: bool, batch: Batch, folder: Path) -> None:
    """Save in the background while training goes on; what is loaded is what the model was when the save began."""
    settings = {"micro_batch": max(1, len(batch[0]) // 2), "device": "cuda"}
    with (
        mz.ShardingConfig(comm="self", **settings) as config,
        mz.distribute(gpt(small), mz.AdamW(lr=1e-3), strategy="ddp", config=config) as model,
        mz.distribute(gpt(small), mz.AdamW(lr=1e-3), strategy="ddp", config=config) as other,
    ):
        model.train(*batch)
        then = model.parameters_sha256()
        stall, pending = timed(model.begin_save, folder / "beside")
        model.train(*batch)
        pending.commit()
        other.load_model(folder / "beside")
        report.check(
            "a save beside training holds what was there when it began", other.parameters_sha256() == then, then[:12]
        )
        report.figure("the save stalled training for", f"{stall * 1e3:.1f} ms")
        other.train(*batch)
        report.check("training goes on from it with the same bits", *_equal(other, model))


def _equal(one: Any, other: Any) -> tuple[bool, str]:
    first, second = one.parameters_sha256(), other.parameters_sha256()
    return first == second, f"{first[:12]} and {second[:12]}"
