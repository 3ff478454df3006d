"""A setting of the process has the value of the newest holder, and its own again after the last, in any order."""

from __future__ import annotations

import faulthandler
import functools
import gc
import signal
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.guard import watchdog
from mpizero.guard.guard import ProcessSetting
from mpizero.sharding import exactness


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_holders_leave_in_any_order(order: tuple[int, ...]) -> None:
    seen: list[Any] = []
    setting = ProcessSetting(seen.append, lambda: seen.append("before"))
    leave = [setting.hold(value) for value in range(3)]
    here = {0, 1, 2}
    for one in order:
        leave[one]()
        leave[one]()  # once more: nothing
        here.discard(one)
        assert seen[-1] == (max(here) if here else "before")
    assert len(seen) == 6


@pytest.fixture
def no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that other tests have left open hold none of the threads."""
    monkeypatch.setattr(exactness, "_of_process", functools.cache(exactness._of_process.__wrapped__))


def blas_threads() -> int:
    np.ones((2, 2)) @ np.ones((2, 2))
    return int(ThreadpoolController().select(user_api="blas").lib_controllers[0].num_threads)


def placed(threads: int, model: Any = None) -> Any:
    config = mz.ShardingConfig(comm="self", threads=threads)
    return mz.DDPModel(mz.nn.MLP(2, [3], 2) if model is None else model, config)


@pytest.mark.usefixtures("no_other_model")
def test_a_model_that_trains_keeps_its_threads_when_another_is_closed() -> None:
    before = blas_threads()
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        for closed in (slice(None), slice(None, None, -1)):
            models = [placed(1), placed(1)]
            first, second = models[closed]
            first.close()
            assert blas_threads() == 1
            second.close()
            assert blas_threads() == 2
    assert blas_threads() == before


@pytest.mark.usefixtures("no_other_model")
def test_a_model_that_was_never_finished_or_closed_gives_the_threads_back() -> None:
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        with pytest.raises(ConfigError, match="float16"):
            placed(1, mz.FunctionModel({"a": np.zeros(2, np.float16)}, lambda p, b: (0.0, {}, 1.0)))
        gc.collect()
        assert blas_threads() == 2
        model = placed(1)
        assert blas_threads() == 1
        del model
        gc.collect()
        assert blas_threads() == 2


def test_the_stacks_of_a_timer_are_written_after_another_timer_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is one that ends nothing here, and is sent by hand."""
    number = signal.SIGURG
    monkeypatch.setattr(watchdog, "_SIGNAL", number)
    with open(tmp_path / "first", "w+") as first, open(tmp_path / "second", "w+") as second:
        timers = watchdog.LockTimer(first), watchdog.LockTimer(second)
        for timer, file in zip(reversed(timers), (second, first), strict=True):
            signal.raise_signal(number)
            file.seek(0)
            assert "test_process_setting" in file.read()
            timer.close()
        assert not faulthandler.unregister(number)
