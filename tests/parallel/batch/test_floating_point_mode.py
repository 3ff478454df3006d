"""A thread whose floating-point mode a library has changed: told on all ranks, before a number depends on it."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import StateError
from mpizero.sharding.batch import changed_float_mode
from mpizero.testing import run_in_threads

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the bits of the mode are those of x86-64")

#: Bits of MXCSR, and what they do.
MODES = {
    0x8000: "replaces subnormal results by 0",
    0x0040: "takes subnormal numbers for 0",
    0x2000: "rounds downward",
    0x4000: "rounds upward",
    0x6000: "rounds toward 0",
}


@contextmanager
def mode(bits: int) -> Iterator[None]:
    """Set bits of this thread's MXCSR, which C's ``fenv_t`` has as its last word."""
    libm, environment = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
    libm.fegetenv(environment)
    environment[7] |= bits
    libm.fesetenv(environment)
    yield
    environment[7] &= ~bits
    libm.fesetenv(environment)


@pytest.mark.parametrize("bits", MODES)
def test_every_change_of_the_mode_is_seen_by_its_effect(bits: int) -> None:
    assert changed_float_mode() == ""
    with mode(bits):
        found = changed_float_mode()
    assert found == MODES[bits]


def test_a_changed_mode_on_one_rank_is_an_error_on_all_and_no_step() -> None:
    x, y, message = np.ones((2, 3), np.float32), np.zeros(2, np.int64), "^rank 1: the floating-point mode of this"

    def run(comm: mz.comm.Communicator) -> None:
        with mz.distribute(mz.nn.MLP(3, [4], 2), mz.SGD(0.1), mesh=mz.Mesh(comm)) as model:
            before = model.parameters_sha256()
            for call in (model.train, model.evaluate, model.compute_gradients):
                with mode(0x8040 if comm.rank == 1 else 0), pytest.raises(StateError, match=message):
                    call(x, y)
            assert model.parameters_sha256() == before
            assert np.isfinite(model.train(x, y))

    run_in_threads(3, run)
