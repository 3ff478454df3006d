"""The part of each matrix of trainings that continuous integration runs has every pair of values of the whole."""

import itertools
import sys
from argparse import Namespace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where Python finds `harness` when it runs one of the scripts
import exactness  # noqa: E402
import exactness_hybrid  # noqa: E402
import own_models  # noqa: E402
from harness.covering import covering  # noqa: E402
from harness.jobs import Mpi  # noqa: E402
from harness.matrix import STRATEGIES, Matrix, Place, chosen_trainings, places  # noqa: E402

sys.path.remove(str(SCRIPTS))

OWN = Matrix("", lambda size: own_models.trainings(own_models.MODELS, size), own_models.values, own_models.train)
#: Each script's matrix, and the numbers of ranks under the first MPI, under the second, and as threads.
MATRICES = {
    "exactness": (exactness.MATRIX, "1,2,3,4,8", "1,2,3,4,8", "1,3,4"),
    "exactness_hybrid": (exactness_hybrid.MATRIX, "4,8", "4,8", "2,6"),
    "own_models": (OWN, "1,2,3,4,8", "1,2,3,4,8", "1,3"),
}


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("name", MATRICES)
def test_a_part_of_the_trainings_has_every_pair_of_their_values(name):
    matrix, first, second, threads = MATRICES[name]
    ranks = {"ranks": first, "second_ranks": second, "threads": threads}
    where = places(Namespace(**ranks, mpiexec="", python="", second_mpiexec="mpiexec", second_python=""))
    whole, part = [], []
    for place, numbers in zip(where, chosen_trainings(matrix, where), strict=True):
        rows = [(place.library, place.ranks, *matrix.values(training)) for training in matrix.trainings(place.ranks)]
        whole += rows
        part += [rows[number] for number in numbers]
    assert pairs(part) == pairs(whole)
    assert len(part) < len(whole) / 5
    strategies = [*STRATEGIES] if name != "exactness_hybrid" else []
    for needed in itertools.product(strategies, (1, 2, 3, 4, 8)):
        assert any(set(needed) <= set(row) for row in part), needed


def test_pairs_that_occur_nowhere_are_not_asked_for():
    rows = [("ddp", 1), ("ddp", 2), ("1f1b", 2), ("ddp", 1)]
    assert [rows[i] for i in covering(rows)] == [("ddp", 1), ("ddp", 2), ("1f1b", 2)]
    assert covering([]) == []


def test_a_job_that_takes_too_long_is_ended_with_one_line_that_names_its_limit(tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nexec sleep 60\n")
    launcher.chmod(0o755)
    options = Namespace(steps=1, progress=False, timeout=0.1)
    with pytest.raises(SystemExit, match=r"^\S+mpiexec -n 2 .*: ended by its limit of 0.1 seconds$"):
        exactness.MATRIX.at(Place("first MPI", 2, Mpi(str(launcher))), options)
