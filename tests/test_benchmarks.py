"""The parts that the benchmarks under scripts/benchmarks/ are built of, and the programs under examples/gallery/."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
FOLDER = SCRIPTS / "benchmarks"
GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
sys.path.insert(0, str(SCRIPTS))  # where Python finds `harness` when it runs one of the scripts

from harness.turns import Team, TeamError, alternate  # noqa: E402

from mpizero._util.numbers import Measurement  # noqa: E402
from mpizero.train.machine import proportional  # noqa: E402

sys.path.remove(str(SCRIPTS))

MEMBER = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from harness.turns import serve
path, rank = sys.argv[1], int(sys.argv[2])
def fail(why):
    raise SystemExit(f"because {{why}}")
serve(path, rank, {{"double": lambda number: 2 * number + rank, "fail": fail}})
"""


def team(program: str = MEMBER) -> Team:
    def commands(path: str) -> list[list[str]]:
        return [[sys.executable, "-c", program, path, str(rank)] for rank in (1, 0)]

    return Team("pair", 2, commands)


def test_every_round_measures_everyone_once_and_begins_with_the_next():
    order = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate(3, ["a", "b", "c"], measure)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert found == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_ratios_are_taken_inside_a_round():
    ratios = Measurement.of_ratios([2.0, 40.0, 9.0], [1.0, 10.0, 3.0])
    assert ratios == Measurement(3.0, 2.0, 4.0)
    assert str(ratios) == "3.00 (2.00 to 4.00)"


def test_a_team_answers_by_rank_and_is_gone_afterwards():
    with team() as pair:
        assert pair.ask("double", number=4) == [8, 9]
        assert pair.ask("double", number=0) == [0, 1]
        pids = list(pair.pids.values())
        assert all(proportional(pid) > 0 for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_member_that_ends_is_reported_with_what_it_wrote():
    with team() as pair, pytest.raises(TeamError, match=r"(?s)pair .*because of this"):
        pair.ask("fail", why="of this")
    with pytest.raises(TeamError, match=r"(?s)pair ended before it began.*no such thing"):
        team("raise SystemExit('no such thing')")


#: Runs a script several times in one job; each word with spaces in it has the options of one run.
IN_TURN = """
import runpy, sys
script, *runs = sys.argv[1:]
for words in runs:
    sys.argv = [script, *words.split()]
    runpy.run_path(script, run_name="__main__")
"""


def test_what_travels_behind_computing_is_timed_in_all_ways_and_sizes():
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    small = "--memory private --strategies ddp,zero2 --dim 64 --layers 1 --samples 1 --rounds 1"
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", IN_TURN, FOLDER / "overlap.py", small, f"{small} --buckets"],
        capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    ways, sizes = done.stdout.split("MiB of a bucket")
    assert re.search(r"\nddp( +[\d.]+){6} .*\nzero2( +[\d.]+){6} ", ways), done.stdout
    assert re.search(
        r"\nddp +default: [\d.]+ ms, 1\.00;  0\.25: .*\nzero2 +default: [\d.]+ ms, 1\.00;  0\.25: ", sizes
    ), done.stdout


def test_the_update_is_timed_beside_collectives_and_plain_loops():
    if not Path(sys.executable).with_name("mpiexec").exists():
        pytest.skip("no mpiexec beside this Python")
    small = "--parts sum,kernel --parameters 1e4 --rounds 1 --repeat 1"
    done = subprocess.run(
        [sys.executable, FOLDER / "optimizer.py", *small.split()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert re.search(r"(?s)\nmpizero +[\d.]+ .*\nreduce-scatter, NumPy +[\d.]+ .*\nAdamW kernel +[\d.]+ ", done.stdout)


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("compare.py", ["--contenders", "zero2,zero4"], "--contenders: unknown zero4"),
        ("compare.py", ["--peers-python", "/bin/false"], "/bin/false has no torch.*--contenders '.*zero3'"),
        pytest.param(
            "compare.py",
            ["--contenders", "ddp,module-ddp@1x2"],
            f"^{re.escape(sys.executable)} has no torch, which --contenders 'module-ddp@1x2' need",
            marks=pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here"),
        ),
        ("optimizer.py", ["--parts", "sums"], "--parts: unknown sums"),
    ],
)
def test_what_is_missing_or_unknown_is_named_before_anything_runs(script, options, expected):
    done = subprocess.run(
        [sys.executable, FOLDER / script, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert re.search(expected, done.stderr), done.stderr


def test_the_example_of_512_ranks_compares_a_smaller_grid_with_one_process(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(GALLERY))
    program = runpy.run_path(str(GALLERY / "grid_512.py"))
    options = "--pipeline 2 --tensor 2 --data 2 --steps 2 --batch 4 --dim 16 --blocks 2 --heads 2 --sequence 4"
    monkeypatch.setattr(sys, "argv", ["grid_512.py", *options.split(), "--zero", "2"])
    program["main"]()
    told = capsys.readouterr().out
    assert re.search(r"^8 threads, 2 stages x 2 parts x 2 replicas, ZeRO-2: .* MB\n", told)
    assert re.search(r"\nthe same bits: sha256 [0-9a-f]{64}\n$", told)

    scope = program["main"].__globals__
    train = scope["train"]

    def wrong_alone(comm, args, **sizes):
        losses, digest = train(comm, args, **sizes)
        return losses, "0" if comm == "self" else digest

    monkeypatch.setitem(scope, "train", wrong_alone)
    with pytest.raises(SystemExit, match="not the same: .* the sha256 [0-9a-f]{64} on the grid, 0 alone"):
        program["main"]()
