"""On every cut of space, layers of fields have the bits that they have where one rank has the whole field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpizero import nn
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.layout.fields import Cut
from mpizero.nn.domain_parallel import on_domain
from mpizero.nn.space import Domain
from mpizero.testing import run_in_threads
from mpizero.types import Run
from tests.nn.checks import gradient_slots, random_parameters

CUTS = [(1, 3), (2, 2), (3, 2), (2, 1), (4,), (3,), (2, 2, 2), (1, 2, 3)]
TRAINING = Run(training=True, seed=3, step=5, first_sample=11)


def passes(layer: Any, params: Any, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    flat, grads = gradient_slots(layer, x.dtype)
    y, cache = layer.forward(params, x, TRAINING)
    dx = layer.backward(params, cache, dy, grads)
    return y, dx, flat


def require_equal_bits(layer: Any, space: tuple[int, ...], channels: int, cut: Cut, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    _, params = random_parameters(layer, rng, dtype)
    x = rng.normal(size=(2, *space, channels)).astype(dtype)
    dy = rng.normal(size=(2, *layer.output_shape(x.shape[1:]))).astype(dtype)
    expected = passes(layer, params, x, dy)

    def on_rank(comm: Any) -> Any:
        domain = Domain(cut, CommunicatorGroup(comm))
        boxes = [(slice(None), *cut.box(array.shape[1:-1], comm.rank)) for array in (x, dy)]
        return passes(on_domain(layer, domain, "layer"), params, x[boxes[0]], dy[boxes[1]])

    parts = run_in_threads(cut.size, on_rank)
    for i, whole in enumerate(expected[:2]):
        for rank, part in enumerate(parts):
            np.testing.assert_array_equal(part[i], whole[(slice(None), *cut.box(whole.shape[1:-1], rank))])
    for name, whole in expected[2].items():
        np.testing.assert_array_equal(sum(part[2][name] for part in parts), whole, name)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_convolutions_have_the_bits_of_one_process(cut):
    axes = len(cut)
    space = (13, 17, 11)[:axes]
    for number, padding in enumerate(("zeros", "none", "reflect", "periodic")):
        for layer in (
            nn.Conv(2, 3, (3, 4, 3)[:axes], padding=padding),
            nn.Conv(
                4, 2, (3, 2, 3)[:axes], stride=(2, 1, 2)[:axes], dilation=(1, 2, 1)[:axes], groups=2, padding=padding
            ),
            nn.ConvTranspose(3, 2, (2, 3, 2)[:axes], stride=2, padding="zeros" if padding == "reflect" else padding),
        ):
            extents = tuple(n - n % 2 for n in space) if padding == "periodic" else space
            dtype = (np.float32, np.float64)[number % 2]
            require_equal_bits(layer, extents, layer.inputs, Cut(cut), dtype)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_layers_have_the_bits_of_one_process(cut):
    axes = len(cut)
    space = (13, 17, 11)[:axes]
    window = (3, 2, 2)[:axes]
    unet = nn.Concatenate(nn.Sequential([nn.Conv(4, 6, (3,) * axes, stride=2), nn.GELU(), nn.Upsample(2, "linear")]))
    for number, layer in enumerate(
        (
            nn.MaxPool(window),
            nn.MaxPool(3, stride=2),
            nn.MaxPool(2, stride=3, partial=False),
            nn.AvgPool(window),
            nn.AvgPool(3, stride=1),
            nn.AvgPool(2, stride=3),
            nn.Upsample(2),
            nn.Upsample((3, 1, 2)[:axes], "linear"),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm(4),
            nn.ChannelLayerNorm(4),
            nn.SpectralConv(4, 3, (5, 4, 6)[:axes]),
            nn.SpectralConv(4, 2, space, padding=0.25),
            nn.Dropout(0.3, site=2),
            nn.Residual(nn.Sequential([nn.Conv(4, 4, (3,) * axes), nn.Tanh()])),
            unet,
            nn.Checkpointed(unet),
        )
    ):
        require_equal_bits(layer, space, 4, Cut(cut), (np.float32, np.float64)[number % 2])


def test_small_fields_are_cut_too():
    """A rank may have no position at all of a coarse level."""
    layer = nn.Sequential(
        [nn.Conv(2, 3, (3, 3), stride=2), nn.GroupNorm(1, 3), nn.ConvTranspose(3, 2, (2, 2), stride=2)]
    )
    for space in ((4, 4), (5, 3), (8, 1)):
        require_equal_bits(layer, space, 2, Cut((4, 2)), np.float32)
        require_equal_bits(nn.SpectralConv(2, 2, (3, 1)), space, 2, Cut((4, 2)), np.float32)
