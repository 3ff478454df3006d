"""The example of segmented volumes: boxes are parts of one volume, the U-Net learns, one set of numbers on any cut."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "gallery" / "volume_segmentation.py"


@pytest.fixture(scope="module")
def program(example):
    return example("volume_segmentation")


def test_boxes_are_parts_of_one_volume(program):
    volumes = program.Volumes(20, 2, seed=0)
    x, y = volumes.read(np.arange(2))
    assert x.shape == (2, 20, 20, 20, 1)
    assert np.unique(y["target"]).tolist() == [0, 1, 2]
    for here in (np.s_[0:5, 10:15, 0:20], np.s_[15:20, 0:20, 7:8]):
        part, labels = volumes.boxes(np.arange(2), here)
        np.testing.assert_array_equal(part, x[:, *here])
        np.testing.assert_array_equal(labels["target"], y["target"][:, *here])


def test_a_rod_is_what_lies_within_its_radius(program):
    image, labels = np.zeros((9, 9, 20)), np.zeros((9, 9, 20), int)
    whole = tuple(slice(0, extent) for extent in image.shape)
    program.Rod(1, np.array([4.0, 4, 3]), np.array([4.0, 4, 12]), 2.5, 0.8).paint(image, labels, whole)
    x, y, z = np.ogrid[*whole]
    outside = np.maximum(np.maximum(3 - z, z - 12), 0)
    np.testing.assert_array_equal(labels, (x - 4) ** 2 + (y - 4) ** 2 + outside**2 < 2.5**2)
    assert (image[4, 4, 3:13] == 0.8).all()
    assert 0 < image[4, 6, 8] <= image[4, 5, 8]
    assert image[4, 8, 8] == 0


def test_the_network_learns_shapes_and_says_so(program, capsys):
    found = program.main(["--small"], "self")
    assert found.accuracy > found.constant + 0.03
    assert min(found.dice) > 0.15  # 0 for vessels and cells if all is background
    told = capsys.readouterr().out
    assert "cut 1 x 1 x 1: 20 x 20 x 20 positions on rank 0; 40 steps" in told
    assert told.endswith(f"sha256 {found.sha256} on 1 ranks\n")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_memory_over_the_limit_is_refused_with_the_advice_of_the_library():
    def last_lines(limit):
        run = [sys.executable, str(PROGRAM), "--extent", "32", "--steps", "1", "--limit-mb", limit]
        done = subprocess.run(run, capture_output=True, text=True, timeout=1800, check=False)
        return done.returncode, (done.stdout + done.stderr).splitlines()[-1]

    status, line = last_lines("10")
    assert status > 0
    assert "OutOfMemoryError: no memory for " in line
    status, line = last_lines("100")
    assert status == 0, line
