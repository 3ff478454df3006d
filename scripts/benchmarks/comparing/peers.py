"""Run one rank of a training of the same GPT with PyTorch or DeepSpeed, with torchrun's environment variables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.turns import timed
from torch import distributed, nn
from torch.nn import functional

from comparing.network import GPT
from comparing.ours import data

RATE = 1e-3


class Peer:
    """Train a GPT with another library than mpizero on one rank; subclasses define the library and the strategy."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.shape, self.rank = shape, int(os.environ["RANK"])
        torch.set_num_threads(shape["threads"])
        torch.manual_seed(0)

    def prepare(self) -> dict[str, Any]:
        """Build the model, collective over all ranks; return its parameter count, the library's version, and a note."""
        self.join()
        plain = GPT(self.shape)
        count = sum(p.numel() for p in plain.parameters())
        version, note = self.wrap(plain)
        x, y = data(self.shape, self.rank)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        return {"parameters": count, "version": version, "note": note}

    def join(self) -> None:
        """Initialize PyTorch's process group from torchrun's environment variables."""
        distributed.init_process_group("gloo")

    def wrap(self, plain: nn.Module) -> tuple[str, str]:
        """Set ``self.model`` and ``self.optimizer``; return the library's version, and a note for the table."""
        raise NotImplementedError

    def loss(self) -> torch.Tensor:
        """Return the mean cross-entropy of this rank's samples."""
        return functional.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())

    def step(self) -> None:
        """Train one step on this rank's samples."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, warmup: int, steps: int) -> float:
        """Train ``warmup`` steps, then time ``steps`` steps between two barriers; return their seconds together."""
        return timed(self.step, distributed.barrier, warmup, steps)

    def values(self) -> list[torch.Tensor]:
        """Return all parameters, gathered if they are sharded."""
        return list(self.model.state_dict().values())

    def digest(self) -> str:
        """Return the SHA-256 of all parameters."""
        found = hashlib.sha256()
        for value in self.values():
            found.update(value.detach().numpy().tobytes())
        return found.hexdigest()


class Torch(Peer):
    """Train with PyTorch: ``placed`` wraps the module, ``optimizer`` makes an optimizer of its parameters."""

    def __init__(self, placed: Callable[[Any], Any], optimizer: Callable[..., Any], shape: dict[str, int]) -> None:
        super().__init__(shape)
        self._placed, self._make = placed, optimizer

    def wrap(self, plain: nn.Module) -> tuple[str, str]:
        """Set up model and optimizer; return the version, and no note."""
        self.model = self._placed(plain)
        self.optimizer = self._make(self.model.parameters(), lr=RATE, fused=True)
        return f"PyTorch {torch.__version__}", ""

    def values(self) -> list[torch.Tensor]:
        """Return all parameters, gathered if they are sharded."""
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in super().values()]


def redundancy_free(parameters: Any, **settings: Any) -> Any:
    """Return ZeroRedundancyOptimizer around AdamW: each rank has the state of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)


def fully_sharded(plain: Any) -> Any:
    """Return a module with ``fully_shard`` (FSDP2) on every block and on the whole."""
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in (*plain.blocks, plain):
        fully_shard(part, mesh=mesh)
    return plain


class DeepSpeed(Peer):
    """Train with one of DeepSpeed's ZeRO stages on CPU over gloo."""

    def __init__(self, stage: int, shape: dict[str, int]) -> None:
        super().__init__(shape)
        self.stage = stage

    def join(self) -> None:
        """Initialize PyTorch's process group by ``deepspeed.init_distributed``."""
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)

    def wrap(self, plain: nn.Module) -> tuple[str, str]:
        """Wrap the model in DeepSpeed's engine; return the version, and a note that names the Adam it uses.

        That is DeepSpeed's own fused Adam if it can be built on this machine, else PyTorch's.
        """
        import deepspeed

        own = os.environ.get("COMPARE_DEEPSPEED_ADAM") == "own"
        parameters: dict[str, Any] = {"lr": RATE, "weight_decay": 0.01}
        if not own:
            parameters |= {"torch_adam": True, "fused": True}
        config = {
            "train_micro_batch_size_per_gpu": self.shape["batch"],
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": parameters},
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 30,
        }
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=plain, model_parameters=plain.parameters(), config=config, dist_init_required=False
        )
        return f"DeepSpeed {deepspeed.__version__}", f"{'DeepSpeed' if own else 'PyTorch'}'s fused AdamW"

    def step(self) -> None:
        """Train one step on this rank's samples by the methods of DeepSpeed's engine."""
        loss = self.loss()
        self.model.backward(loss)
        self.model.step()

    def values(self) -> list[torch.Tensor]:
        """Return copies of all parameters, which are gathered first under stage 3."""
        import deepspeed

        parameters = list(self.model.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3):
            return [p.detach().clone() for p in parameters]


CLASSES: dict[str, Callable[[dict[str, int]], Peer]] = {
    "torch-plain": partial(Torch, lambda plain: plain, torch.optim.AdamW),
    "torch-ddp": partial(Torch, nn.parallel.DistributedDataParallel, torch.optim.AdamW),
    "torch-zero1": partial(Torch, nn.parallel.DistributedDataParallel, redundancy_free),
    "torch-fsdp2": partial(Torch, fully_sharded, torch.optim.AdamW),
    **{f"deepspeed-zero{stage}": partial(DeepSpeed, stage) for stage in (1, 2, 3)},
}
