"""The hook that plants faults: free when nothing is planted, exact when something is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero._util import faults
from mpizero._util.faults import ACTIONS, SITES, Fault, InjectedError
from mpizero.checkpoint import LocalArray

ROOT = Path(faults.__file__).resolve().parents[2]


def planted(text, **environment):
    return Fault.from_environment({"MPIZERO_FAULT": text, **environment})


def test_nothing_is_planted_by_default():
    assert Fault.from_environment({}) is None
    assert planted("") is None
    faults.inject("save.write")


@pytest.mark.parametrize("launcher", ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_only_the_rank_meant_is_struck(launcher):
    text = "save.write:2:1:raise"
    assert planted(text, **{launcher: "2"}) is not None
    assert planted(text, **{launcher: "1"}) is None
    assert planted(text) is None
    assert planted("save.write:*:1:raise", **{launcher: "1"}) is not None


@pytest.mark.parametrize(("call", "struck"), [("3", [3]), ("*", [1, 2, 3, 4])])
def test_only_the_call_meant_is_struck_or_every_one(call, struck):
    fault, found = planted(f"train.step:0:{call}:raise"), []
    for number in range(1, 5):
        try:
            fault.inject(None)
        except InjectedError:
            found.append(number)
    assert found == struck


def test_what_is_handed_over_can_be_spoiled(tmp_path):
    values = np.ones((2, 2), np.float32)
    planted("train.step:0:1:nan").inject(values)
    assert np.isnan(values).tolist() == [[True, False], [False, False]]
    (tmp_path / "file").write_bytes(bytes(9))
    planted("save.sync:0:1:truncate").inject(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 4
    planted("train.step:0:1:sleep=0.01").inject(None)


@pytest.mark.parametrize(
    "text",
    ["x", "save.write:0:1", "save.write:0:1:explode", "nowhere:0:1:kill", "save.write:-1:1:kill", "save.write:0:x:kill"]
    + ["save.write:0:1:sleep=soon", "save.write:0:1:kill:now", "save.write:0:0:kill"],
)
def test_what_names_no_fault_is_refused(text):
    with pytest.raises(ValueError, match="expected site:rank:k:action"):
        planted(text)


def test_every_site_is_in_the_list_and_in_the_code():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mpizero").rglob("*.py"))
    assert set(re.findall(r"\binject\(\s*\"([\w.]+)\"", sources)) == set(SITES)
    assert all(hasattr(Fault, f"_{action}") for action in ACTIONS)


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("save.write:0:2:raise", 1, "InjectedError('planted at save.write, call 2')"),
        ("save.manifest:0:1:exit=3", 3, ""),
        ("save.commit:0:1:kill", -9, ""),
        ("save.commit:0:2:kill", 0, ""),
        ("save.sync:0:1:truncate", 1, "state.h5: has"),
        ("load.read:0:1:raise", 1, "InjectedError"),
    ],
)
def test_a_fault_happens_at_its_place_in_a_save(tmp_path, fault, status, said):
    values = np.arange(100.0)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        faults._FAULT = planted(fault)
        pieces = ((0, values[:50]), (50, values[50:]))
        try:
            checkpoint.write(tmp_path / "step_00000001", [LocalArray("a", (100,), values.dtype, pieces)], {})
            with checkpoint.open_checkpoint(tmp_path / "step_00000001") as reader:
                os._exit(reader.read_whole("a").tobytes() != values.tobytes())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(1)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    with os.fdopen(read) as pipe:
        assert said in pipe.read()
    committed = status == 0 or fault.startswith("load")
    assert (tmp_path / "step_00000001").exists() == committed
    # The next one clears up.
    checkpoint.write(tmp_path / "step_00000002", [LocalArray("a", (100,), values.dtype, ((0, values),))], {})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
