"""Every kernel of the CPU has the values of its form in NumPy, or its bits, and writes nothing else."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from mpizero.kernels import cpu
from tests.kernels.cases import EXACT, Draw, cases
from tests.support import reference

#: Flat elements, rows, columns, and the length of a permutation: none, one, and around the blocks of kernels.
SIZES = [(0, 0, 4, 0), (1, 1, 1, 1), (7, 3, 2, 3), (256, 4, 8, 10), (1025, 9, 257, 1000), (5000, 2, 4200, 4097)]


def called(case, package=cpu):
    """Call a kernel on arrays that are read-only where it says so."""
    module, name = case.kernel.split(".")
    args = case.copies()
    parameters = getattr(import_module(f"{cpu.__name__}.{module}"), name).signature.parameters
    for value, parameter in zip(args, parameters, strict=False):
        if isinstance(value, np.ndarray):
            value.flags.writeable = not parameter.readonly
    return case.called(package, args), args


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_kernel_agrees_with_its_oracle(sizes, dtype):
    """Within a twentieth of what a GPU may differ by: five units in the last place of the largest value."""
    for case in cases(Draw(dtype, *sizes)):
        error, where = case.error(called)
        assert error <= 0.05, (case.kernel, where)
        if case.kernel in EXACT:
            (result, got), (expected, wanted) = called(case), called(case, reference)
            assert result == expected, case.kernel
            arrays = [pair for pair in zip(got, wanted, strict=True) if isinstance(pair[0], np.ndarray)]
            for number, (one, other) in enumerate(arrays):
                assert number == case.scratch or one.tobytes() == other.tobytes(), (case.kernel, number)
