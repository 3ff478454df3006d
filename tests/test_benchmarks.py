"""The parts that the benchmarks under scripts/benchmarks/ are built of, and the programs under examples/gallery/."""

from __future__ import annotations

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


@pytest.mark.slow
def test_a_team_answers_by_rank_and_is_gone_afterwards():
    with team() as pair:
        assert pair.ask("double", number=4) == [8, 9]
        assert pair.ask("double", number=0) == [0, 1]
        pids = list(pair.pids.values())
        assert all(proportional(pid) > 0 for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_a_member_that_ends_is_reported_with_what_it_wrote():
    with team() as pair, pytest.raises(TeamError, match=r"(?s)pair .*because of this"):
        pair.ask("fail", why="of this")
    with pytest.raises(TeamError, match=r"(?s)pair ended before it began.*no such thing"):
        team("raise SystemExit('no such thing')")


@pytest.mark.slow
def test_steps_between_nodes_are_timed_computed_and_slept():
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    small = "--contenders ddp,zero2@0.1 --dim 64 --layers 1 --samples 1 --rounds 1 --steps 1"
    for how in ("", " --slept --forward 0.01 --backward 0.01"):
        done = subprocess.run(
            [mpiexec, "-n", "2", sys.executable, FOLDER / "nodes.py", *f"{small}{how}".split()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert re.search(r"\nddp +[\d.]+ +.*\nzero2@0.1 +[\d.]+ .*\nalone +[\d.]+ ", done.stdout), done.stdout


@pytest.mark.slow
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
