"""``mpizero new`` writes projects that train as they are, and never over what is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpizero.cli.main import main
from mpizero.comm.startup import one_process
from mpizero.errors import ConfigError
from mpizero.tools import projects as writing
from mpizero.tools.projects import KINDS, new_project
from tests.projects.readme import assert_one_hash, follow_readme

TEMPLATES = Path(writing.__file__).with_name("templates")
#: What others need is in the environment of tests/peers, which follows their READMEs.
HERE = ["gpt", "fortran", "numpy", "inversion", "field"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HERE)
def test_the_readme_leads_to_one_hash_on_one_rank_and_on_four(kind, tmp_path):
    """Of fields, whose command for ranks says how to cut space, under mpiexec; of others on threads of their test."""
    if kind == "fortran" and shutil.which("gfortran") is None:
        pytest.skip("needs gfortran")
    found = follow_readme(new_project(tmp_path / "project", kind), launch=kind == "field")
    if kind == "field":
        assert_one_hash(found)
    assert found


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A project of each kind, in a folder whose name has a blank."""
    folder = tmp_path_factory.mktemp("all kinds")
    return [new_project(folder / f"my {kind}", kind) for kind in KINDS]


def test_every_template_is_used_and_every_placeholder_filled(projects):
    own = {path for kind in KINDS.values() for path, _ in kind.files.values()}
    shared = {f"common/{name}" for name in ("README.md", "gitignore", "job.sbatch", "test_layouts.py")}
    assert {str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.in")} == {
        f"{path}.in" for path in own | shared
    }
    for folder in projects:
        for path in folder.iterdir():
            assert "%%" not in path.read_text(encoding="utf-8"), path


def test_python_of_the_projects_is_as_tidy_as_ours(projects):
    for words in (["check", "--select=E,F,W,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", "--line-length=120"]
        done = subprocess.run([*command, projects[0].parent], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_batch_scripts_are_of_the_mpi_that_they_name(projects):
    for folder in projects:
        for job, pmi in (("job_mpich.sbatch", "pmi2"), ("job_openmpi.sbatch", "pmix")):
            text = (folder / job).read_text(encoding="utf-8")
            assert f"srun --mpi={pmi} " in text
            assert f"#SBATCH --job-name={folder.name.replace(' ', '-')}\n" in text  # a blank would end the name
            assert subprocess.run(["bash", "-n", folder / job], check=False).returncode == 0


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis: is not empty \(chapter.tex\)"):
        new_project(tmp_path / "thesis", "gpt")
    (tmp_path / "link").symlink_to("gone")
    for taken in (tmp_path / "thesis" / "chapter.tex", tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"{taken.name}: is no folder"):
            new_project(taken, "gpt")
    assert {path.name for path in tmp_path.rglob("*")} == {"thesis", "chapter.tex", "link"}


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(path, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        new_project(tmp_path / "deep" / "project", "gpt")
    assert not list((tmp_path / "deep").iterdir())


def test_an_empty_folder_is_taken_and_stays_the_one_that_it_was(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    before = (tmp_path / "mine").stat().st_ino
    new_project(tmp_path / "link", "numpy")
    assert (tmp_path / "mine").stat().st_ino == before
    assert not [path for path in (tmp_path / "mine").iterdir() if path.is_dir()]
    assert (tmp_path / "mine" / "model.py").exists()


@pytest.mark.parametrize("given", [["--kind", "tensorflow"], []])
def test_all_kinds_are_listed_where_none_is_named(given, tmp_path, capsys):
    with pytest.raises(ConfigError) as told:
        main(["new", str(tmp_path / "new"), *given], one_process())
    assert f"there are {', '.join(KINDS)} (" in str(told.value)
    assert not (tmp_path / "new").exists()


def test_what_is_missing_is_told_and_the_project_written_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(writing.shutil, "which", lambda program: None)
    assert main(["new", str(tmp_path / "rod"), "--kind", "fortran"], one_process()) == 0
    assert "it needs gfortran, which is not installed" in capsys.readouterr().out
    assert (tmp_path / "rod" / "heat.f90").exists()
