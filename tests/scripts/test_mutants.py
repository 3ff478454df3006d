"""The script that plants mistakes, and its list of them."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import mutants  # noqa: E402
from mutants import SITES, Mutant  # noqa: E402

sys.path.remove(str(SCRIPTS))

SOURCE = """
class Sum:
    def mean(self, values):
        return sum(values) / len(values)

    def total(self, values):
        return sum(values)


def mean(values):
    return 0
"""
TEST = """
import pytest
from mpizero.sums import Sum

@pytest.mark.parametrize("values", [[1], [1, 3]])
def test_a_mean(values):
    assert Sum().mean(values) == sum(values) / len(values)

def test_a_total():
    assert Sum().total([]) == 0
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package of one module and its tests, in place of this one."""
    root = tmp_path / "checkout"
    for name, text in {"mpizero/sums.py": SOURCE, "tests/test_sums.py": TEST, "pyproject.toml": ""}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", root)
    return root


@pytest.fixture
def workshop(checkout, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    return mutants.Workshop(home)


def mutant(function="Sum.mean", before="/ len(values)", after="/ 1", test="test_a_mean"):
    return Mutant("divisor", function, before, after, test)


@pytest.mark.slow
def test_a_mutant_that_tests_notice_is_killed_and_taken_out_again(workshop, capsys):
    assert mutants.try_all([mutant()], 1, []) == 0
    begun, verdict, told = capsys.readouterr().out.splitlines()
    assert begun.startswith("the tests pass without a mutant")
    assert (verdict.split()[0], verdict.split()[-1]) == (mutants.KILLED, "test_a_mean[values1]")
    assert told.startswith("1 of 1 mutants killed")
    assert workshop.try_out(mutant(test="test_a_mean[values0]")).verdict == mutants.SURVIVED
    assert (workshop.root / "mpizero/sums.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"function": "Sum.meen"}, "0 functions are called Sum.meen"),
        ({"before": "values"}, "'values' is 3 times in them"),
        ({"before": "0"}, "'0' is 0 times in them"),
        ({"test": "test_nothing"}, "0 tests are called test_nothing"),
        ({"after": "/ ("}, "pytest ended with status 4"),
    ],
)
def test_a_mutant_that_does_not_fit_is_no_killed_one(workshop, changed, told):
    outcome = workshop.try_out(mutant(**changed))
    assert outcome.verdict == mutants.NOT_PLANTED
    assert told in outcome.told


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_end_the_run(checkout, capsys):
    (checkout / "mpizero/sums.py").write_text(SOURCE.replace("/ len(values)", "/ len(values) + 1"))
    assert mutants.try_all([mutant()], 1, []) == 1
    assert "tests fail without any mutant" in capsys.readouterr().out


@pytest.mark.slow
def test_every_mutant_of_the_list_can_be_planted_and_there_are_enough_to_draw_from():
    parsed = functools.cache(lambda path: ast.dump(ast.parse(path.read_text(encoding="utf-8"))))
    for site in SITES:
        path, text = mutants.planted(ROOT, site)
        assert ast.dump(ast.parse(text)) != parsed(path), site
        assert mutants.test_of(ROOT, site)
    assert len({site.name for site in SITES}) == len(SITES) > mutants.COUNT


def test_the_same_seed_draws_the_same_mutants(monkeypatch, capsys):
    def listed(*options):
        monkeypatch.setattr(sys, "argv", ["mutants.py", "--list", *options])
        assert mutants.main() == 0
        return capsys.readouterr().out.splitlines()

    assert listed() == listed("--seed", "0") != listed("--seed", "1")
    assert len(listed()) == mutants.COUNT
    assert [line.split()[0] for line in listed("--only", SITES[3].name)] == [SITES[3].name]
