"""Train one GPT with mpizero and with PyTorch from the same weights, and compare the losses step by step.

    python scripts/compare_torch.py                  # 50 steps in float32 and in float64
    python scripts/compare_torch.py --time           # seconds of a step, interleaved, and their ratio

Needs ``pip install torch==2.13.0`` (the CPU build). The exit status is 1 if the losses of a step differ by more than
1e-5 (float32) or 1e-10 (float64), relative to PyTorch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by NumPy's and PyTorch's BLAS when they are loaded

import numpy as np  # noqa: E402


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 50), ("dim", 64), ("layers", 2), ("heads", 4), ("sequence", 64), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--time", action="store_true", help="measure the time of a step instead")
    return parser.parse_args()


try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    arguments()  # --help works without it
    sys.exit("this script compares with PyTorch, which is missing: pip install torch==2.13.0")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mpizero.nn import (  # noqa: E402
    GPT,
    from_torch,
    gradient_slots,
    initial_parameters,
    keep_freed_memory,
    loss_and_gradients,
    model_specs,
    to_torch,
)
from mpizero.optim import AdamW  # noqa: E402
from mpizero.types import Run  # noqa: E402

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
LEARNING_RATE, DECAY = 1e-3, 0.1


class TorchBlock(nn.Module):
    """Compute a pre-norm transformer block; its parameters have GPT-2's names."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(dim, 3 * dim), "c_proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(dim, 4 * dim), "c_proj": nn.Linear(4 * dim, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention to ``x``, then the feed-forward layers, and return the result."""
        samples, length, dim = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(samples, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(samples, length, dim))
        hidden = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class TorchGPT(nn.Module):
    """The model of :class:`mpizero.nn.GPT` in PyTorch; its parameters have GPT-2's names."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(model.vocabulary, model.dim),
                "wpe": nn.Embedding(model.sequence, model.dim),
                "h": nn.ModuleList(TorchBlock(model.dim, model.heads) for _ in range(model.layers)),
                "ln_f": nn.LayerNorm(model.dim),
            }
        )
        self.lm_head = nn.Linear(model.dim, model.vocabulary, bias=False)
        if model.tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self.to(getattr(torch, str(model.dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits for token ids."""
        h = self.transformer["wte"](x) + self.transformer["wpe"].weight[: x.shape[1]]
        for block in self.transformer["h"]:
            h = block(h)
        return self.lm_head(self.transformer["ln_f"](h))

    def mean_loss(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        """Return the mean cross-entropy of the targets ``y``, given the tokens ``x``; targets below 0 are ignored."""
        logits = self(torch.from_numpy(x))
        target = torch.from_numpy(y).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.clamp(min=-1), ignore_index=-1)


def torch_twin(model: GPT, named: dict[str, np.ndarray]) -> TorchGPT:
    """Build the same model in PyTorch, with copies of the weights ``named`` (by mpizero's names)."""
    twin = TorchGPT(model)
    twin.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in to_torch(model, named).items()})
    return twin


def here(model: GPT, named: dict[str, np.ndarray]) -> Callable[[int, np.ndarray, np.ndarray], float]:
    """Return a function that does one training step of mpizero in this process and returns the mean loss.

    Its arguments are the number of the step, inputs and targets. It updates the weights ``named`` in place by AdamW.
    """
    optimizer = AdamW(lr=LEARNING_RATE, weight_decay=DECAY)
    specs = {spec.name: spec for spec in model_specs(model) if spec.tied is None}
    state = {name: {slot: np.zeros(spec.size, model.dtype) for slot in optimizer.slots} for name, spec in specs.items()}

    slots = gradient_slots(model)

    def step(index: int, x: np.ndarray, y: np.ndarray) -> float:
        run = Run(training=True, step=index)
        loss_sum, weight, gradients = loss_and_gradients(model, named, (x, y), run, 1.0 / y.size, slots)
        for name, spec in specs.items():
            hyper = optimizer.hyper(index + 1, optimizer.group_of(spec), model.dtype)
            optimizer.apply(named[name].reshape(-1), gradients[name].reshape(-1), state[name], hyper)
        return loss_sum / weight

    return step


def there(model: GPT, twin: TorchGPT) -> Callable[[int, np.ndarray, np.ndarray], float]:
    """Return a function that does the same training step on the PyTorch model ``twin`` and returns the mean loss.

    As in mpizero, weight decay is only on the parameters of ``model`` that decay: its matrices.
    """
    decays = {name for name, spec in zip(to_torch_names(model), model_specs(model), strict=True) if spec.decay}
    parameters = dict(twin.named_parameters())
    groups = [
        {"params": [value for name, value in parameters.items() if name in decays], "weight_decay": DECAY},
        {"params": [value for name, value in parameters.items() if name not in decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def step(index: int, x: np.ndarray, y: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = twin.mean_loss(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def to_torch_names(model: GPT) -> list[str]:
    """Return the PyTorch names of a model's parameters, in the order of ``model_specs``."""
    return list(to_torch(model, {spec.name: np.empty(spec.shape) for spec in model_specs(model) if spec.tied is None}))


def library_text() -> np.ndarray:
    """Return the first MiB of the sources of Python's standard library, as an array of bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files)[: 1 << 20], np.uint8)


def batches(text: np.ndarray, options: argparse.Namespace, seed: int = 0):  # noqa: ANN201
    """Yield without end inputs and targets: random windows of the text, and the same windows one byte later."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - options.sequence - 1, options.batch)
        windows = np.stack([text[start : start + options.sequence + 1] for start in starts]).astype(np.int64)
        yield np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def pair(options: argparse.Namespace, dtype: str) -> tuple[Callable[..., float], Callable[..., float]]:
    """Return the training steps of mpizero and of PyTorch, which begin with the same weights.

    The weights are mapped to PyTorch's names and back, so that this mapping is tested, too.
    """
    model = GPT(options.dim, options.layers, options.heads, options.sequence, dtype=dtype, seed=1)
    named = initial_parameters(model)
    twin = torch_twin(model, named)
    return here(model, from_torch(model, twin.state_dict())), there(model, twin)


def compare(options: argparse.Namespace, dtype: str) -> bool:
    """Train with both libraries; print the largest relative difference of losses, and tell if it is small enough."""
    ours, theirs = pair(options, dtype)
    worst, losses = 0.0, (0.0, 0.0)
    for index, (x, y) in zip(range(options.steps), batches(library_text(), options), strict=False):
        losses = ours(index, x, y), theirs(index, x, y)
        worst = max(worst, abs(losses[0] - losses[1]) / abs(losses[1]))
    verdict = "ok" if worst <= TOLERANCE[dtype] else "TOO LARGE"
    print(
        f"{dtype}: {options.steps} steps, last loss {losses[0]:.6f} here, {losses[1]:.6f} in PyTorch; "
        f"largest relative difference {worst:.2e} (limit {TOLERANCE[dtype]:.0e}): {verdict}"
    )
    return worst <= TOLERANCE[dtype]


def measure(options: argparse.Namespace) -> None:
    """Print the median time of a float32 step of both libraries, whose steps alternate in this process."""
    keep_freed_memory()
    steps = pair(options, "float32")
    source = batches(library_text(), options)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(options.steps + 3):
        x, y = next(source)
        for step, seconds in zip(steps, times, strict=True):
            start = time.perf_counter()
            step(index, x, y)
            seconds.append(time.perf_counter() - start)
    ours, theirs = (seconds[3:] for seconds in times)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    print(
        f"float32, {options.batch} x {options.sequence} tokens: {1e3 * statistics.median(ours):.1f} ms here, "
        f"{1e3 * statistics.median(theirs):.1f} ms in PyTorch; PyTorch's time / ours: {ratio:.2f} (median)"
    )


def main() -> int:
    """Compare losses, or with ``--time`` the time of a step; return the exit status."""
    options = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if options.time:
        measure(options)
        return 0
    return 0 if all([compare(options, dtype) for dtype in TOLERANCE]) else 1


if __name__ == "__main__":
    sys.exit(main())
