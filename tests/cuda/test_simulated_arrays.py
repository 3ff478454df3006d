"""Simulated arrays refuse what CuPy's refuse, so that code which CuPy would not run fails in the simulator."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from tests.support.simulated import arrays
from tests.support.simulated.arrays import NAMESPACE, SimulatedArray


@pytest.fixture
def there():
    return SimulatedArray(np.arange(6.0).reshape(2, 3))


def test_what_numpy_has_and_cupy_has_not_is_what_simulated_arrays_refuse():
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    functions = [name for name in dir(np) if name[0] != "_" and callable(getattr(np, name))]
    functions = {name for name in functions if not isinstance(getattr(np, name), type) and not hasattr(cupy, name)}
    assert functions <= arrays.ABSENT_FUNCTIONS
    assert not {name for name in arrays.ABSENT_FUNCTIONS if hasattr(cupy, name)}
    attributes = {name for name in dir(np.ndarray) if name[0] != "_" and not hasattr(cupy.ndarray, name)}
    assert attributes <= arrays.ABSENT_ATTRIBUTES
    assert not {name for name in arrays.ABSENT_ATTRIBUTES if hasattr(cupy.ndarray, name)}


@pytest.mark.parametrize("name", ["vecdot", "insert", "spacing"])
def test_a_function_that_cupy_has_not(there, name):
    with pytest.raises(AttributeError, match=f"CuPy has no {name}"):
        getattr(NAMESPACE, name)


@pytest.mark.parametrize(
    "refused",
    [
        operator.attrgetter("ctypes"),
        operator.attrgetter("flags.writeable"),
        lambda x: np.add(x, x, where=True),
        lambda x: NAMESPACE.add(x, x, order="C"),
        lambda x: np.vecdot(x, x),
        lambda x: x.get(out=np.empty((2, 3), np.float32)),
        lambda x: x.get(out=np.empty((2, 6))[:, ::2]),
        lambda x: x[:, :2].set(np.zeros((2, 2))),
        lambda x: x.set(np.zeros((2, 3), np.float32)),
    ],
)
def test_what_cupy_refuses(there, refused):
    with pytest.raises((AttributeError, TypeError, ValueError)):
        refused(there)
    assert np.array_equal(there.get(), np.arange(6.0).reshape(2, 3))
