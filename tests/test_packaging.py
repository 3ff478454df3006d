"""What package managers and those who cite read is what setup.cfg says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "packaging"))
import generate  # noqa: E402

sys.path.remove(str(ROOT / "scripts" / "packaging"))


@pytest.fixture
def tree(tmp_path):
    """A folder with setup.cfg and the files that the script has written."""
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    generate.write(tmp_path)
    return tmp_path


def change(tree: Path, old: str, new: str) -> None:
    text = (tree / "setup.cfg").read_text(encoding="utf-8")
    assert old in text
    (tree / "setup.cfg").write_text(text.replace(old, new), encoding="utf-8")


def test_recipes_and_citation_agree_with_setup_cfg(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_another_version_changes_every_file_and_leaves_none_of_the_old(tree, capsys):
    written = set(generate.outputs(generate.Metadata.read(tree / "setup.cfg")))
    change(tree, "version = 0.1.0", "version = 0.2.0")
    outdated = set(generate.differences(tree))
    assert written < outdated
    assert generate.main(["--check", "--root", str(tree)]) == 1
    assert "CITATION.cff does not agree with setup.cfg" in capsys.readouterr().err
    generate.write(tree)
    assert generate.differences(tree) == []
    assert [path.name for path in tree.glob("scripts/packaging/easybuild/*")] == ["mpizero-0.2.0-foss-2025b.eb"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("numba>=0.62\n", "numba>=0.99\n", "setup.cfg needs numba>=0.99, the easyconfig has 0.62.0"),
        ("tqdm>=4.60\n", "tqdm>=4.60\n    newcomer\n", "newcomer: add the module that has it to EASYBUILD"),
        ("tqdm>=4.60\n", "tqdm~=4.60\n", "'tqdm~=4.60': this script reads NAME or NAME>=VERSION"),
    ],
)
def test_what_no_recipe_can_say_is_an_error_that_writes_nothing(tree, capsys, old, new, message):
    change(tree, old, new)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert generate.main(["--root", str(tree)]) == 1
    assert message in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
