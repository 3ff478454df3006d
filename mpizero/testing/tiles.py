"""Check that a model or a layer has the same bits on tensor or context groups of all sizes that its tiles allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpizero import nn, optim
from mpizero.comm.threads import run_in_threads
from mpizero.errors import ArgumentError, ConfigError
from mpizero.parallel import HybridShardedModel, ShardingConfig
from mpizero.parallel.partition.parallel_layout import TILED_AXES
from mpizero.testing.ranks import first_difference, parallel_assert
from mpizero.types import BlockModel, Layer, Loss


@dataclass(frozen=True)
class _OneLayer:
    """Hold a layer as a model, behind a norm whose gradient shows the gradient of the layer's input."""

    blocks: Mapping[str, Any]
    dtype: np.dtype[Any]
    loss: Loss = field(default_factory=nn.MeanSquaredError)
    seed: int = 0


def assert_same_tiles(
    model: Any, x: Any, y: Any = None, *, tiles: int = 4, axis: str = "tensor", steps: int = 2, **settings: Any
) -> None:
    """Assert that a model has the bits of one process with the same tiles on groups of all sizes that fit them.

    Ranks are threads of this process: groups of ``tiles`` ranks, half as many, and so on, train like one process that
    computes all tiles. After each step loss, gradients and parameters are compared. Not collective.

    Parameters
    ----------
    model : BlockModel or Layer
        What is trained; a layer behind a :class:`mpizero.nn.LayerNorm` if ``x`` is of floats, with
        :class:`mpizero.nn.MeanSquaredError`.
    x, y : array
        Inputs and targets, the same in every step. ``y=None`` means zeros, for a layer with a method ``output_shape``.
    tiles : int
        Number of tiles, a power of two of at least 2.
    axis : {"tensor", "context"}
        What the groups split: layers (``split``), or sequences (``context``).
    steps : int
        Number of steps of training, with AdamW.
    **settings
        Settings of :class:`~mpizero.ShardingConfig`, such as ``micro_batch`` and ``clip``.

    Raises
    ------
    AssertionError
        If the bits differ. The message names the number of ranks, the first of them, and the first array that differs.
    ConfigError
        If the model cannot be split so, or ``tiles`` or ``axis`` is wrong.
    """
    if axis not in TILED_AXES:
        raise ConfigError(f"axis={axis!r}: expected 'tensor' or 'context'")
    if tiles not in (sizes := [2**k for k in range(1, 11)]):
        raise ConfigError(f"tiles={tiles!r}: expected a power of two from 2 to {sizes[-1]}")
    whole, targets = _whole(model, x, y)

    def trained(comm: Any, size: int) -> list[dict[str, Any]]:
        layout: dict[str, Any] = {f"{axis}_parallel_size": size, "optimizer": optim.AdamW(lr=1e-2)}
        seen: list[dict[str, Any]] = []
        with (
            ShardingConfig(comm=comm, **{**settings, "tiles": {axis: tiles}}) as config,
            HybridShardedModel(whole, config, **layout) as placed,
        ):
            for _ in range(steps):
                gradients = placed.compute_gradients(x, targets, gather=True).named()
                loss = placed.train(x, targets)
                seen.append({"loss": loss, "gradient": gradients, "parameter": dict(placed.named_parameters())})
        return seen

    expected = trained("self", 1)
    for size in reversed([size for size in sizes if size <= tiles]):

        def compare(comm: Any, size: int = size) -> None:
            place = f"{tiles} tiles on {size} ranks: step"
            difference = first_difference(trained(comm, size), expected, place)
            parallel_assert(comm, not difference, difference)

        run_in_threads(size, compare)


def _whole(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the model to train, which holds a layer if ``model`` is one, and the targets."""
    if isinstance(model, BlockModel):
        if y is None:
            raise ArgumentError("assert_same_tiles: y is missing: a model needs targets")
        return model, y
    if not isinstance(model, Layer):
        raise ArgumentError(f"assert_same_tiles: {model!r:.80} is neither a model of blocks nor a layer")
    values = np.asarray(x)
    floats = values.dtype.kind == "f"
    dtype = np.dtype(np.float64 if values.dtype == np.float64 else np.float32)
    if y is None:
        try:
            shape = model.output_shape(values.shape[1:])  # type: ignore[attr-defined]
        except AttributeError:
            raise ArgumentError(f"assert_same_tiles: {type(model).__name__} has no output_shape: give y") from None
        y = np.zeros((len(values), *shape), dtype)
    before = {"norm": nn.LayerNorm(values.shape[-1])} if floats else {}
    return _OneLayer({**before, "layer": model}, dtype), y
