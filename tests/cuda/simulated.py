"""What tests on simulated GPUs share: they are skipped where Numba is without its simulator."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import mpizero as mz
from tests.support.simulated import ASKED

# The simulator is chosen when numba is imported; without it these kernels need a GPU.
if not ASKED:
    pytest.skip("CUDA kernels run under NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

PRIVATE = {"share_node_memory": False}


def config(comm=None, **settings):
    settings = {"device": "cuda", "micro_batch": 2, "minimum_parameter_group_size": 1} | settings
    return mz.ShardingConfig(comm=comm, **settings)


@contextmanager
def bound(network, optimizer, comm=None, place=mz.DDPModel, loss_scale=None, **settings):
    """Place a network, and bind an optimizer to it."""
    with config(comm, **settings) as sharding, place(network, sharding) as model:
        mz.ShardedOptimizer(optimizer, sharding, loss_scale=loss_scale).set_model(model)
        yield model
