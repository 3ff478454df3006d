"""The script that shows that a restructuring has only moved code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "moved.py"
sys.path.insert(0, str(SCRIPT.parent))
import moved  # noqa: E402

sys.path.remove(str(SCRIPT.parent))

BEFORE = {
    "mpizero/__init__.py": "",
    "mpizero/layout/__init__.py": "",
    "mpizero/layout/tree.py": '"""See mpizero.layout.flat."""\n_MOST = 1\ndef merge(held):\n    return [held, _MOST]\n',
    "mpizero/layout/flat.py": (
        "from mpizero.layout import tree\nfrom mpizero.layout.tree import merge as joined\n_LEAST = 2\n"
        "class Layout:\n    size = 3\n    def total(self, held):\n"
        '        """Join, as layout/tree.py says (:mod:`mpizero.layout.tree`)."""\n'
        "        return tree.merge(held), joined(held), _LEAST\n"
    ),
}
#: The same in one file.
MERGED = (
    '"""All of it."""\n_MOST = 1\n_LEAST = 2\ndef merge(held):\n    return [held, _MOST]\n'
    "class Layout:\n    size = 3\n    def total(self, held):\n"
    '        """Join, as layout.py says (:mod:`mpizero.layout`)."""\n'
    "        return merge(held), merge(held), _LEAST\n"
)


def after(text):
    return {"mpizero/__init__.py": "", "mpizero/layout.py": text}


def told(before, text):
    """What is told of a tree with this text in place of the two modules, by title."""
    found = moved.compared(before, after(text))._asdict()
    return {
        title: [line[0].qualified if title == "changed" else line.partition(" ")[0] for line in lines]
        for title, lines in found.items()
        if lines
    }


def test_modules_in_one_file_are_nothing_to_tell():
    assert told(BEFORE, MERGED) == {}


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        ("[held, _MOST]", "[held, 1]", {"changed": ["merge"]}),
        ("    size = 3\n", "", {"changed": ["Layout"]}),
        ("_LEAST = 2\n", "", {"missing": ["_LEAST"]}),
        ("_LEAST = 2\n", "_LEAST = 3\n", {"changed": ["_LEAST"]}),
        ("Join, as", "Join as", {"changed": ["Layout.total"]}),
        ("self, held", "self, held, merge", {"changed": ["Layout.total"]}),  # which hides the function
        ("class Layout", "def merge(held):\n    pass\nclass Layout", {"colliding": ["merge"], "added": ["merge"]}),
        ("size = 3\n", "size = 3\n    total = 4\n", {"colliding": ["Layout.total"], "changed": ["Layout"]}),
        ("class Layout", "from mpizero.text import merge\nclass Layout", {"colliding": ["merge"]}),
        ("    size = 3\n", "    size = 3\n    def merge(held):\n        return [held, _MOST]\n", {"duplicated": ["1"]}),
    ],
)  # fmt: skip
def test_what_is_not_only_moved_is_told(text, other, expected):
    assert MERGED.count(text) == 1
    assert told(BEFORE, MERGED.replace(text, other)) == expected


def test_two_constants_of_one_name_are_told_where_they_come_together():
    before = {path: text.replace("_LEAST", "_MOST") for path, text in BEFORE.items()}
    assert told(before, MERGED.replace("_LEAST", "_MOST")) == {"colliding": ["_MOST"]}
    assert told(before, MERGED.replace("_LEAST = 2\n", "").replace("_LEAST", "_MOST")) == {"missing": ["_MOST"]}


def test_a_move_of_all_is_nothing_to_tell():
    apart = {path.replace("layout/", "plans/"): text.replace("layout", "plans") for path, text in BEFORE.items()}
    assert moved.compared(BEFORE, apart) == ([], [], [], [], [], [])


def test_what_depends_on_its_file_is_told_where_it_moves():
    line = "_HOME = Path(__file__).parent\n"
    before = {"mpizero/comm/home.py": line}
    assert moved.compared(before, {"mpizero/home.py": line}).placed == [
        "_HOME (mpizero/home.py), before in mpizero/comm/home.py"
    ]
    assert not moved.compared(before, before).placed


def test_names_and_paths_that_are_no_more_are_found():
    gone = moved.Gone.between([*BEFORE, "tests/layout/test_tree.py"], [*after(""), "tests/test_layout.py"])
    text = (
        "from mpizero.layout.tree import merge\nfrom mpizero.layout import tree, TreeNode\nimport mpizero.layout\n"
        "'mpizero.layout.flat.Layout', 'see layout/tree.py', 'mpizero/layout/flat.py', 'other/layout/tree.py'\n"
        "'tests/layout/test_tree.py', 'layout/', 'mpizero.layout.Flat', 'mpizero.layouts'\n"
    )
    assert sorted(gone.names_in("tests/test_layout.py", text)) == [
        (1, "mpizero.layout.tree"),
        (2, "from mpizero.layout import tree"),
        (4, "layout/tree.py"),
        (4, "mpizero.layout.flat.Layout"),
        (4, "mpizero/layout/flat.py"),
        (5, "layout/"),
        (5, "tests/layout/test_tree.py"),
    ]


def test_the_command_compares_a_checkout_with_a_revision(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def git(*arguments):
        named = ["-c", "user.name=name", "-c", "user.email=name@example.org"]
        subprocess.run(["git", "-C", tmp_path, *named, *arguments], check=True, capture_output=True)

    write(BEFORE | {"docs/page.md": "- `layout/tree.py`: trees\n"})
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "before")
    command = [sys.executable, SCRIPT, "HEAD", "--folder", tmp_path]
    same = subprocess.run(command, capture_output=True, text=True, check=True)
    assert same.stdout == "0 missing, 0 changed, 0 duplicated, 0 colliding, 0 stale, 0 added\n"
    for name in ("tree.py", "flat.py", "__init__.py"):
        (tmp_path / "mpizero/layout" / name).unlink()
    write(after(MERGED.replace("_LEAST = 2\n", "")))
    ended = subprocess.run([*command, "--diff"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == [
        "missing: _LEAST (mpizero/layout/flat.py)",
        "stale: docs/page.md:1: layout/tree.py",
        "1 missing, 0 changed, 0 duplicated, 0 colliding, 1 stale, 0 added",
    ]
