"""CUDA kernels in the simulator: every one has its oracle's values, and those over flat arrays the CPU's bits."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import kernels
from mpizero.kernels.cuda.launch import cuda, kernel
from tests.cuda import simulated  # noqa: F401 - skips this module without the simulator
from tests.kernels.cases import EXACT, Draw, cases, compression


def require_values(every):
    for case in every:
        (result, there), (expected, here) = (
            (case.called(package, args), args)
            for package, args in ((kernels.cuda, case.copies()), (kernels.cpu, case.copies()))
        )
        error, where = case.error(lambda case, outcome=(result, there): outcome)
        assert error <= 0.05, (case.kernel, where)
        if case.kernel in EXACT or case.kernel.startswith("update."):
            arrays = [pair for pair in zip(there, here, strict=True) if isinstance(pair[0], np.ndarray)]
            assert result == expected, case.kernel
            for number, (one, other) in enumerate(arrays):
                assert number == case.scratch or one.tobytes() == other.tobytes(), (case.kernel, number)


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")  # the simulator looks for infinity
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((0, 0, 4, 0), np.float32), ((1, 1, 1, 1), np.float64), ((7, 3, 5, 11), np.float32)]
)
def test_every_kernel_agrees_with_its_oracle_and_with_the_cpu(sizes, dtype):
    """Sums over blocks of the simulated GPU's three threads leave a remainder, and nothing at all."""
    require_values(cases(Draw(dtype, *sizes)))


def test_compressed_messages_of_several_blocks_have_the_bits_of_the_cpu():
    require_values(compression(Draw(np.float32, 300, 1, 1, 1)))


def test_a_nan_stays_one_in_16_bits_and_numbers_at_their_limits_round_as_on_the_cpu():
    numbers = [np.nan, 0.0, -0.0, 65504.0, 65520.0, 1e9, 6e-8, 3e-8, 2.9e-8, 1e-40, np.inf, -np.inf, 2049.0]
    x = np.array(numbers, np.float32)
    for name in ("bfloat16", "float16"):
        halves, wide = np.zeros((2, x.size), np.uint16), np.zeros((2, x.size), np.float32)
        for package, half, back in zip((kernels.cuda, kernels.cpu), halves, wide, strict=True):
            getattr(package.layers, f"to_{name}")(x, half)
            getattr(package.layers, f"from_{name}")(half, back)
        assert np.isnan(wide[:, 0]).all()
        assert halves[0, 1:].tobytes() == halves[1, 1:].tobytes()
        assert wide[0, 1:].tobytes() == wide[1, 1:].tobytes()


def test_threads_that_run_in_turn_stop_at_barriers_and_raise_their_errors(in_turn):
    @kernel("void(f8[::1])")
    def rotated(x):
        kept, i = cuda.shared.array(3, np.float64), cuda.threadIdx.x
        for _ in range(2):
            kept[i] = x[i]
            cuda.syncthreads()
            x[i] = kept[(i + 1) % 3]
            if x[i] < 0:
                raise ValueError("a negative value")
            cuda.syncthreads()

    x = np.arange(3.0)
    rotated(x)
    assert x.tolist() == [2.0, 0.0, 1.0]
    for bad in range(3):
        with pytest.raises(ValueError, match=r"tid=\[\d, 0, 0\].*a negative value"):
            rotated(np.where(np.arange(3) == bad, -1.0, 1.0))
    rotated(x)
    assert x.tolist() == [1.0, 2.0, 0.0]


def test_the_wrong_number_of_arguments_or_dimensions_is_refused_by_name():
    with pytest.raises(TypeError, match="scale takes 2 arguments"):
        kernels.cuda.layers.scale(np.ones(3))
    with pytest.raises(TypeError, match="x must have 1 dimension"):
        kernels.cuda.layers.scale(np.ones((3, 3)), np.ones(1))
