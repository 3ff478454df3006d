"""Measure on the GPU: AdamW beside a copy, whole steps beside PyTorch and cuBLAS, and what a step waits for.

Contenders run in turns, and ratios are taken of times of one round. The medians of all rounds are written down, with
the smallest and the largest value in parentheses.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import turns
from harness.turns import alternate

import mpizero as mz
from gpu_checking.report import Report, timed
from gpu_checking.running import command_line
from mpizero._util.numbers import Measurement
from mpizero.kernels import cuda, gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))  # has the network of PyTorch

#: The GPT of the steps, and how many sequences a step has: one grain.
GPT = {"dim": 1024, "layers": 12, "heads": 16, "sequence": 512, "vocabulary": 256}
SMALL_GPT = {"dim": 4, "layers": 1, "heads": 1, "sequence": 2, "vocabulary": 3}
BATCH, SMALL_BATCH = 16, 1
#: Floats that AdamW reads and writes for one element.
TOUCHED = 7
RATE = 1e-3


def speed(report: Report, small: bool) -> None:
    """Measure all of it; in the simulator the same code runs, and seconds mean nothing."""
    device = gpu.open_device(0)
    shape, batch = (SMALL_GPT, SMALL_BATCH) if small else (GPT, BATCH)
    with report.attempt("AdamW beside a copy"):
        _adamw(report, device, 100 if small else 100_000_000, rounds=1 if small else 7)
    rounds, steps = (1, 1) if small else (4, 3)
    rates: dict[str, str] = {}
    precisions = ("float32",) if small else ("float32", "bfloat16")

    def measure(precision: str, kinds: tuple[str, ...]) -> None:
        with report.attempt(f"steps, {precision}, {', '.join(kinds)}"):
            rates[f"{precision}, {kinds[0]}"] = _steps(report, shape, batch, precision, kinds, (rounds, steps))

    for precision in precisions:
        measure(precision, ("cuBLAS alone", "PyTorch eager", *(("PyTorch TF32",) if precision == "float32" else ())))
    with report.attempt("what a step launches and copies"):
        _launches_and_copies(report, shape, batch)
    with report.attempt("phases of a step"):
        _phases(report, shape, batch, small)
    for precision in () if small else precisions:  # last: compiling may take what time is left
        measure(precision, ("PyTorch compiled",))
    report.figure("in short", "; ".join(f"{name}: {told}" for name, told in rates.items()))


def _adamw(report: Report, device: gpu.Device, size: int, rounds: int) -> None:
    """Compare the fused AdamW kernel, which reads 4 and writes 3 floats an element, with a copy of as many bytes."""
    rng = np.random.default_rng(0)
    w, g, m, v = (device.put(rng.random(size, np.float32)) for _ in range(4))
    one, other = (device.empty(size * TOUCHED // 2, np.float32) for _ in range(2))
    hyper = device.put(np.array([0.99, 0.9, 0.1, 0.999, 0.001, RATE, 1.0, 1e-8], np.float32))

    def copy() -> None:
        other[:] = one

    work = {"AdamW": lambda: cuda.update.adamw(w, g, m, v, hyper, 0, size), "copy": copy}
    for call in work.values():
        call()
    steps = 1 if rounds == 1 else 10
    found = alternate(rounds, list(work), lambda name: turns.timed(work[name], device.synchronize, 0, steps) / steps)
    for name, taken in found.items():
        rate = Measurement.of([size * TOUCHED * 4 / 1e9 / each for each in taken])
        report.figure(f"{name}, {size:,} elements", f"{rate.text(0)} GB/s")
    report.figure("AdamW over the copy rate", Measurement.of_ratios(found["copy"], found["AdamW"]))


# ---------------------------------------------------------------------------------------------- steps


def _samples(shape: dict[str, int], batch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    ids = np.random.default_rng(0).integers(0, shape["vocabulary"], (batch, shape["sequence"] + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


class Ours:
    """Train a GPT with mpizero on the GPU, on one rank; ``precision`` is that of the products' operands."""

    def __init__(self, shape: dict[str, int], batch: int, precision: str) -> None:
        sixteen = None if precision == "float32" else precision
        self.device = gpu.open_device(0)
        self.config = mz.ShardingConfig(comm="self", device="cuda", micro_batch=batch, mixed_precision=sixteen)
        self.model = mz.distribute(mz.nn.GPT(**shape), mz.AdamW(lr=RATE), strategy="ddp", config=self.config)
        self.batch = _samples(shape, batch)

    def step(self) -> None:
        """Train one step."""
        self.model.train(*self.batch)

    def wait(self) -> None:
        """Wait until the GPU has finished all work: ``train`` waits for the loss, not for the update after it."""
        self.device.synchronize()

    def close(self) -> None:
        """Free the model's memory."""
        self.model.close()
        self.config.close()


class Torch:
    """Train the same GPT with PyTorch: "eager", "TF32" (eager with products in TF32), or "compiled" block by block."""

    def __init__(self, shape: dict[str, int], batch: int, precision: str, kind: str) -> None:
        import torch
        from comparing.network import GPT as Network
        from comparing.network import next_tokens

        self.torch, self.kind, self.sixteen, self.next_tokens = torch, kind, precision != "float32", next_tokens
        self.place = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.model = Network(shape).to(self.place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        for block in self.model.blocks if kind == "compiled" else ():
            block.compile()
        self.x, self.y = (torch.from_numpy(values).to(self.place) for values in _samples(shape, batch))

    def step(self) -> None:
        """Train one step."""
        torch = self.torch
        torch.set_float32_matmul_precision("high" if self.kind == "TF32" else "highest")
        with torch.autocast(self.place, torch.bfloat16, enabled=self.sixteen):
            loss, count = self.next_tokens(self.model(self.x), self.y)
            loss = loss / count
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until the GPU has finished all work."""
        if self.place == "cuda":
            self.torch.cuda.synchronize()


class Products:
    """Compute only the products of the step's linear layers with cuBLAS through CuPy: how fast a step could be."""

    def __init__(self, shape: dict[str, int], batch: int, precision: str) -> None:
        dim, rows = shape["dim"], batch * shape["sequence"]
        kind = np.float32 if precision == "float32" else np.float16  # CuPy has no bfloat16; the rate is the same
        blocks = [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)]
        self.device, self.products = gpu.open_device(0), []
        for times, (inner, outer) in [*((shape["layers"], size) for size in blocks), (1, (dim, shape["vocabulary"]))]:
            sizes = (rows, inner), (inner, outer), (rows, outer)
            self.products.append((times, *(self.device.put(np.ones(size, kind)) for size in sizes)))

    def step(self) -> None:
        """Compute the products of one forward and backward pass."""
        for times, x, w, y in self.products:
            for _ in range(times):
                x @ w  # noqa: B018 - forward
                y @ w.T  # noqa: B018 - gradient of the input
                x.T @ y  # noqa: B018 - gradient of the weight

    def wait(self) -> None:
        """Wait until the GPU has finished all work."""
        self.device.synchronize()


def _made(name: str, shape: dict[str, int], batch: int, precision: str) -> Any:
    """Return the contender of this name."""
    if name == "mpizero":
        return Ours(shape, batch, precision)
    if name == "cuBLAS alone":
        return Products(shape, batch, precision)
    return Torch(shape, batch, precision, name.removeprefix("PyTorch "))


def _steps(
    report: Report, shape: dict[str, int], batch: int, precision: str, names: tuple[str, ...], sizes: tuple[int, int]
) -> str:
    """Time whole steps of mpizero and of other contenders in turns; return all rates in a line.

    ``sizes`` are the number of rounds and of the steps of a turn. A contender that cannot run is left out.
    """
    rounds, steps = sizes
    made: dict[str, Any] = {}

    def seconds(name: str) -> float:
        return turns.timed(made[name].step, made[name].wait, 0, steps) / steps

    for name in ("mpizero", *names):
        if name.startswith("PyTorch") and importlib.util.find_spec("torch") is None:
            report.figure(f"{name}, {precision}", "PyTorch is not installed")
            continue
        with report.attempt(f"first steps of {name}, {precision}"):
            made[name] = None
            made[name] = _made(name, shape, batch, precision)
            report.figure(f"first steps of {name}, {precision}", f"{timed(seconds, name)[0]:.1f} s")  # compiles
            continue
        del made[name]
    found = alternate(rounds, list(made), seconds)
    told = []
    for name, taken in found.items():
        rate = Measurement.of([batch * shape["sequence"] / each for each in taken])
        ratio = "" if name == "mpizero" else f"; mpizero over it {Measurement.of_ratios(taken, found['mpizero'])}"
        report.figure(f"{name}, {precision}", f"{rate.text(0)} tokens/s{ratio}")
        told.append(f"{name} {rate.median:,.0f}")
    if "mpizero" in made:
        made["mpizero"].close()
    made.clear()
    gc.collect()
    return ", ".join(told) + " tokens/s"


def _phases(report: Report, shape: dict[str, int], batch: int, small: bool) -> None:
    """Write down where the time of a step goes, by phases as the host sees them."""
    ids = np.random.default_rng(0).integers(0, shape["vocabulary"], 4096).astype(np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_bytes(ids.tobytes())
        sizes = "\n".join(f"{name} = {size}" for name, size in shape.items() if name != "vocabulary")
        (Path(folder) / "config.toml").write_text(
            f'[model]\nname = "gpt"\n{sizes}\n[data]\ntext = "{folder}/text"\n'
            f'[train]\ndevice = "cuda"\nglobal_batch = {batch}\nmicro_batch = {batch}\nvalidate_every = 0\n',
            encoding="utf-8",
        )
        steps = ["--steps", "1" if small else "4", "--warm-up", "1"]
        command = [*command_line(small), "bench", "step", f"{folder}/config.toml", "--json", *steps]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n")
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:])
        phases = json.loads(done.stdout.splitlines()[-1])["ranks"][0]["phases"]
        taken = {name: phase["seconds"]["median"] for name, phase in phases.items() if phase["seconds"]}
        told = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in taken.items() if seconds > 5e-5)
        report.figure("phases of a step, ms of the host", told)


def _launches_and_copies(report: Report, shape: dict[str, int], batch: int) -> None:
    """Write down how many kernels a step launches, and what it copies between host and GPU."""
    from mpizero.kernels.cuda.launch import CudaKernel

    made, seconds, copied = Ours(shape, batch, "float32"), Counter[str](), Counter[str]()

    def watch(owner: Any, name: str, kind: str, size: Callable[..., int]) -> Callable[[], None]:
        usual = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            copied[kind] += size(*args[1:])
            copied[f"{kind}: calls"] += 1
            taken, result = timed(lambda: usual(*args, **named))
            seconds[kind] += taken
            return result

        setattr(owner, name, watched)
        return lambda: setattr(owner, name, usual)

    kind = type(made.device)
    restore = [
        watch(CudaKernel, "__call__", "launches", lambda *args: 1),
        watch(kind, "_array", "samples to the GPU", lambda values: values.nbytes),
        watch(kind, "send", "values to the GPU", lambda target, sources: target.nbytes),
        watch(kind, "read", "values to the host", lambda source, parts: sum(host.nbytes for _, host in parts)),
    ]
    try:
        made.step()  # which loads kernels
        seconds.clear()
        copied.clear()
        whole, _ = timed(made.step)
    finally:
        for undo in restore:
            undo()
        made.wait()
        made.close()
    for name in seconds:
        amount = (
            f"{copied[name]:,}" if name == "launches" else f"{copied[name] / 1e6:.2f} MB in {copied[f'{name}: calls']}"
        )
        report.figure(f"a step's {name}", f"{amount}, {seconds[name] * 1e3:.1f} ms of the host's {whole * 1e3:.1f}")
