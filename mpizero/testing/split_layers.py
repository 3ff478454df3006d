"""Check that a split model or layer has the bits of one process on groups of all sizes that its tiles allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpizero import nn, optim
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.threads import run_in_threads
from mpizero.errors import ArgumentError, ConfigError
from mpizero.sharding import HybridShardedModel, ShardingConfig
from mpizero.sharding.partition import TILED_AXES, fits_tiles
from mpizero.testing.differences import first_difference
from mpizero.testing.split_passes import SplitPasses
from mpizero.types import BlockModel, Loss

_SIZES = [2**k for k in range(1, 11)]


@dataclass(frozen=True)
class OneLayer:
    """Hold a layer as a model, behind a norm whose gradient shows the gradient of the layer's input."""

    blocks: Mapping[str, Any]
    dtype: np.dtype[Any]
    loss: Loss = field(default_factory=nn.MeanSquaredError)
    seed: int = 0


@dataclass(frozen=True)
class SplitTraining:
    """Train a model on groups of several sizes that compute the same tiles; see :func:`assert_same_as_serial`."""

    model: Any
    batch: tuple[Any, Any]
    tiles: int
    axis: str
    steps: int
    settings: Mapping[str, Any]

    def check(self, comm: Communicator | None) -> None:
        """Raise AssertionError on all ranks if the bits depend on the group. Collective over ``comm``, if given."""
        if comm is None:
            expected = self.serial()
            for size in reversed([size for size in _SIZES if size <= self.tiles]):
                run_in_threads(size, lambda ranks: self._compare(ranks, expected))
            return
        with all_ranks(comm, "assert_same_as_serial"):
            if not fits_tiles(comm.size, self.tiles):
                raise ConfigError(
                    f"{self.tiles} tiles do not fit {comm.size} ranks: each computes 1, 2, 4, ... of them"
                )
            expected = self.serial()
        self._compare(comm, expected)

    def serial(self) -> list[dict[str, Any]]:
        """Train in this process, check the passes of every block, and return what each step has given."""
        passes = SplitPasses(self.model, self.axis, self.tiles)
        passes.check_parameters()
        found = self._trained("self", 1)
        passes.check_passes(found[-1]["parameter"], self.batch)
        return found

    def _compare(self, comm: Communicator, expected: list[dict[str, Any]]) -> None:
        place = f"{self.tiles} tiles on {comm.size} ranks: step"
        difference = first_difference(self._trained(comm, comm.size), expected, place)
        told = comm.allgather_object(difference, tag="assert_same_as_serial")
        if wrong := [rank for rank, text in enumerate(told) if text]:
            raise AssertionError(f"{told[wrong[0]]} (on rank {wrong[0]}; {len(wrong)} of {comm.size} ranks differ)")

    def _trained(self, comm: Any, size: int) -> list[dict[str, Any]]:
        """Return for each step its loss, and by name the gradients and the parameters after it."""
        layout: dict[str, Any] = {f"{self.axis}_parallel_size": size, "optimizer": optim.AdamW(lr=1e-2)}
        seen: list[dict[str, Any]] = []
        with (
            ShardingConfig(comm=comm, **{**self.settings, "tiles": {self.axis: self.tiles}}) as config,
            HybridShardedModel(self.model, config, **layout) as placed,
        ):
            for _ in range(self.steps):
                gradients = placed.compute_gradients(*self.batch, gather=True).named()
                loss = placed.train(*self.batch)
                seen.append({"loss": loss, "gradient": gradients, "parameter": dict(placed.named_parameters())})
        return seen


def split_training(
    model: Any, x: Any, y: Any, *, tiles: int, axis: str, steps: int, settings: Mapping[str, Any]
) -> SplitTraining:
    """Return the training that checks a model of blocks or a layer. Not collective.

    Raises
    ------
    ConfigError, TypeError
        An argument is wrong or missing.
    """
    if axis not in TILED_AXES:
        raise ConfigError(f"axis={axis!r}: expected 'tensor' or 'context'")
    if tiles not in _SIZES:
        raise ConfigError(f"tiles={tiles!r}: expected a power of two from 2 to {_SIZES[-1]}")
    if x is None:
        raise ArgumentError("assert_same_as_serial: x is missing: a layer or a model needs inputs")
    return SplitTraining(*_whole(model, x, y), tiles, axis, steps, settings)


def _whole(model: Any, x: Any, y: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the model to train, which holds a layer if ``model`` is one, and the batch."""
    if isinstance(model, BlockModel):
        if y is None:
            raise ArgumentError("assert_same_as_serial: y is missing: a model needs targets")
        return model, (x, y)
    values = np.asarray(x)
    dtype = np.dtype(np.float64 if values.dtype == np.float64 else np.float32)
    if y is None:
        try:
            shape = model.output_shape(values.shape[1:])
        except AttributeError:
            raise ArgumentError(f"assert_same_as_serial: {type(model).__name__} has no output_shape: give y") from None
        y = np.zeros((len(values), *shape), dtype)
    before = {"norm": nn.LayerNorm(values.shape[-1])} if values.dtype.kind == "f" else {}
    return OneLayer({**before, "layer": model}, dtype), (x, y)
