"""Files of every version of the format, as they were written by the mpizero of their time, load for ever."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint.convert import export

STORED = Path(__file__).parent / "stored"
A = np.arange(12, dtype=np.float32).reshape(3, 4)
VERSION_1 = {
    "parameters/a.weight": A,
    "parameters/scale": np.array(0.1),
    "parameters/none": np.zeros((0, 2), np.float32),
    "optimizer/exp_avg/a.weight": -A,
    "optimizer/half/a.weight": np.arange(12, dtype=np.float16),
    "optimizer/steps": np.array([1, 2**40]),
}


#: Written by the direct back end, and by parallel HDF5 1.10 on two ranks.
FOLDERS = ("version1", "version1_mpio")


@pytest.mark.parametrize("name", [*FOLDERS, "version1.bin"])
def test_version_1_loads(name):
    path = STORED / name
    opened = checkpoint.open_checkpoint(path) if path.is_dir() else checkpoint.from_bytes(path.read_bytes())
    with opened as reader:
        assert reader.attributes == {"step": 3, "text": "ä"}
        reader.check({key: (value.shape, value.dtype) for key, value in VERSION_1.items()})
        for key, value in VERSION_1.items():
            assert reader.read_whole(key).tobytes() == value.tobytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_version_1_passes_the_full_check_is_read_by_plain_h5py_and_exports(name, tmp_path):
    assert checkpoint.verify(STORED / name) > 0
    with h5py.File(STORED / name / "state.h5") as file:
        for key, value in VERSION_1.items():
            assert file[key][()].tobytes() == value.tobytes()
    with checkpoint.open_checkpoint(STORED / name) as reader:
        export(reader, tmp_path / "out.npz", "npz", state=True)
    with np.load(tmp_path / "out.npz") as found:
        assert {key: found[key].tobytes() for key in found.files} == {
            key.removeprefix("parameters/"): value.tobytes() for key, value in VERSION_1.items()
        }
