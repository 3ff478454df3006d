"""A path in the home folder of somebody whom the system does not know is an error of its own, wherever one is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.checks import home_path
from mpizero.cli.main import main
from mpizero.errors import ConfigError

PLACE = "~nobody-of-this-name/run"
CONFIG = '[model]\nname = "mlp"\n[data]\narrays = "digits"\n[train]\nsteps = 1\n{}'


def trained(folder: Path, more: str) -> None:
    (folder / "run.toml").write_text(CONFIG.format(more))
    main(["train", str(folder / "run.toml")])


def fitted(folder: Path) -> None:
    source = mz.data.ArraySource(np.ones((8, 2), np.float32), np.zeros(8, np.int64))
    settings: dict[str, Any] = {"steps": 1, "global_batch": 4, "run": PLACE, "progress": False}
    with mz.Trainer(mz.nn.MLP(2, [], 2), source, mz.ShardingConfig(), optimizer=mz.SGD(0.1), **settings) as trainer:
        trainer.fit()


PLACES: dict[str, Callable[[Path], Any]] = {
    "report": lambda folder: main(["report", PLACE]),
    "report -o": lambda folder: main(["report", str(folder), "-o", PLACE]),
    "watch": lambda folder: main(["watch", PLACE, "--once"]),
    "new": lambda folder: main(["new", PLACE, "--kind", "numpy"]),
    "checkpoint.folder": lambda folder: trained(folder, f'[checkpoint]\nfolder = "{PLACE}"\n'),
    "Trainer": fitted,
}


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_home_folder_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{PLACE}(/checkpoints)?: there is no such home folder; give the whole path"):
        PLACES[place](tmp_path)


def test_a_home_folder_that_there_is_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_path("~/run") == tmp_path / "run"
    assert home_path(Path("run/~x")) == Path("run/~x")


def test_a_function_in_an_unknown_home_folder_is_named_with_its_setting(tmp_path: Path) -> None:
    text = '[model]\nmake = "~nobody-of-this-name/m.py:make"\n[data]\narrays = "digits"\n[train]\nsteps = 1\n'
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r'run\.toml:2: model\.make = "~nobody.*: there is no such home folder'):
        main(["train", str(tmp_path / "run.toml")])
