"""Run one rank of a training with mpizero, or only the matrix products of one rank's training step."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness.turns import timed

#: The shapes that are compared, and how many steps a turn of them has.
PRESETS = {
    "base": {"ranks": 2, "dim": 256, "layers": 4, "heads": 4, "batch": 8, "sequence": 128, "steps": 8},
    "strong": {"ranks": 2, "dim": 256, "layers": 4, "heads": 4, "batch": 1, "sequence": 64, "steps": 40},
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
#: Contenders that train PyTorch's module with mpizero: the strategy, and whose kernels compute its functions.
MODULES = {f"module-{strategy}": (strategy, "torch") for strategy in STRATEGIES}
MODULES |= {f"kernels-{strategy}": (strategy, "mpizero") for strategy in STRATEGIES}
#: Name of the contender that computes only the step's products, by NumPy's BLAS into allocated memory.
LIMIT = "products alone"


class Ours:
    """Train a GPT with mpizero on this rank, with one strategy.

    ``shape`` has the sizes "ranks", "threads" (of a rank), "dim", "layers", "heads", "batch" (sequences of a rank),
    "sequence" and "vocabulary". ``grain`` is the ``micro_batch`` of the configuration; None takes all sequences of a
    rank.
    """

    def __init__(self, strategy: str, shape: dict[str, int], grain: int | None) -> None:
        from mpi4py import MPI

        import mpizero as mz

        self.mz, self.world, self.strategy, self.shape, self.grain = mz, MPI.COMM_WORLD, strategy, shape, grain

    def prepare(self) -> dict[str, Any]:
        """Build the model, collective over all ranks; return its parameter count, the library, and the BLAS."""
        from mpizero.train.machine import blas

        mz, shape = self.mz, self.shape
        gpt = self.made()
        config = mz.ShardingConfig(comm=self.world, micro_batch=self.grain or shape["batch"], threads=shape["threads"])
        self.model = mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy=self.strategy, config=config)
        self.x, self.y = data(shape, self.world.rank)
        return {"parameters": self.model.parameter_count, "version": "mpizero", "note": blas()}

    def made(self) -> Any:
        """Return the model that is trained."""
        names = ("dim", "layers", "heads", "sequence", "vocabulary")
        return self.mz.nn.GPT(**{name: self.shape[name] for name in names})

    def turn(self, warmup: int, steps: int) -> float:
        """Train ``warmup`` steps, then time ``steps`` steps between two barriers; return their seconds together."""
        return timed(self.train, self.world.Barrier, warmup, steps)

    def train(self) -> None:
        """Train one step."""
        self.model.train(self.x, self.y)

    def digest(self) -> str:
        """Return the SHA-256 of all parameters."""
        found: str = self.model.parameters_sha256()
        return found


class OurModule(Ours):
    """Train the GPT of PyTorch, the module that the peers train, with mpizero and one strategy.

    ``kernels`` is the option of ``TorchModel``.
    """

    def __init__(self, strategy: str, kernels: str, shape: dict[str, int], grain: int | None) -> None:
        super().__init__(strategy, shape, grain)
        self.kernels = kernels

    def made(self) -> Any:
        """Return the module as a model of blocks."""
        from comparing.network import GPT, next_tokens

        return self.mz.adapters.torch.TorchModel(
            lambda: GPT(self.shape), next_tokens, blocks=["embedding", "blocks.*", "head"], kernels=self.kernels
        )


class LinearProducts:
    """Compute the matrix products of all linear layers of a GPT in one training step.

    Each layer has three: forward, gradient of the input, gradient of the weights. ``operations`` is the number of
    floating-point operations of all products.
    """

    def __init__(self, shape: dict[str, int]) -> None:
        rows, dim, layers = shape["batch"] * shape["sequence"], shape["dim"], shape["layers"]
        maps = [(layers, dim, 3 * dim), (layers, dim, dim), (layers, dim, 4 * dim), (layers, 4 * dim, dim)]
        self.operations, random = 0, np.random.default_rng(0)
        self.products: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for count, inputs, outputs in (*maps, (1, dim, shape["vocabulary"])):
            self.operations += 6 * count * rows * inputs * outputs
            for _ in range(count):
                sizes = ((rows, inputs), (inputs, outputs), (rows, outputs))
                x, w, dy = (random.standard_normal(size, np.float32) for size in sizes)
                self.products += [(x, w, np.empty_like(dy)), (dy, w.T, np.empty_like(x)), (x.T, dy, np.empty_like(w))]

    def __call__(self) -> None:
        """Compute all products once, by NumPy's BLAS."""
        for left, right, out in self.products:
            np.matmul(left, right, out=out)


class Products:
    """Time only the matrix products of one rank's step.

    Those of attention are not run. Their time is estimated from their number of operations, at the rate of the others.
    """

    def __init__(self, strategy: str, shape: dict[str, int], grain: int | None) -> None:
        from mpi4py import MPI

        self.world, self.shape = MPI.COMM_WORLD, shape

    def prepare(self) -> dict[str, Any]:
        """Allocate operands and results, and count operations; return NumPy's version and the BLAS for the table."""
        from mpizero.nn import GPT, model_operations
        from mpizero.train.machine import blas

        self.linear, shape = LinearProducts(self.shape), self.shape
        gpt = GPT(shape["dim"], shape["layers"], shape["heads"], shape["sequence"], vocabulary=shape["vocabulary"])
        counted = model_operations(gpt, (shape["sequence"],)).values()
        # Attention's products are small and batched; it is assumed that they run as fast as the others.
        self.stretch = shape["batch"] * sum(operations.total for operations in counted) / self.linear.operations
        return {"parameters": None, "version": f"NumPy {np.__version__}", "note": blas()}

    def turn(self, warmup: int, steps: int) -> float:
        """Return the seconds of the products of ``steps`` steps, timed between two barriers after ``warmup`` steps."""
        return self.stretch * timed(self.linear, self.world.Barrier, warmup, steps)


def data(shape: dict[str, int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of one rank's part of a global batch of random tokens."""
    total = shape["ranks"] * shape["batch"]
    text = np.random.default_rng(0).integers(0, shape["vocabulary"], (total, shape["sequence"] + 1))
    mine = text[rank * shape["batch"] : (rank + 1) * shape["batch"]]
    return np.ascontiguousarray(mine[:, :-1]), np.ascontiguousarray(mine[:, 1:])
