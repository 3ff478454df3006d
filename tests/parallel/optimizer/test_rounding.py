"""Optimizers of which a difference in the last place becomes a large one say so where layouts round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, mlp, points, sharded

OPTIMIZERS = (mz.SGD(lr=0.1), mz.Adam(), mz.AdamW(), mz.RMSprop(), mz.Lion(), mz.LAMB(), mz.Muon(), mz.SOAP())


def grown(optimizer: Any) -> float:
    """How many times larger a difference of one parameter in its last place is after five steps."""
    found = []
    x, y = points(32)
    for changed in (False, True):
        with sharded("ddp", None, mlp(hidden=(16, 16)), optimizer, micro_batch=8) as model:
            values = model.get_parameters()
            last = np.spacing(values[5])
            values[5] += last if changed else 0
            model.set_parameters(values)
            for _ in range(5):
                model.train(x, y)
            found.append(model.get_parameters())
    return float(np.abs(found[1] - found[0]).max() / np.abs(last))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
def test_what_magnifies_rounding_says_so_where_layouts_round(optimizer: Any) -> None:
    told = getattr(optimizer, "magnifies_rounding", "")
    assert (grown(optimizer) > 1000) == bool(told)

    def reasons(comm: Any, compression: str | None) -> tuple[str, ...]:
        with sharded("zero1", comm, None, optimizer, gradient_compression=compression, ema=0.9, **PRIVATE) as model:
            return tuple(model.metadata().within_rounding)

    assert run_in_threads(2, lambda comm: reasons(comm, None)) == [()] * 2  # the bits of one process
    rounds = "gradient_compression='bf16' rounds what ranks send"
    assert run_in_threads(2, lambda comm: reasons(comm, "bf16")) == [(rounds, *([told] if told else []))] * 2
