"""What README and docs/ show is true: their Python runs, their commands, options, files and links exist."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "examples").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]
ids = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def run(*command: str, folder: Path) -> str:
    """What a script, or a module after ``-m``, prints, run in this process as the main program with these words."""
    out, known, status = io.StringIO(), set(sys.modules), None
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        mock.patch.object(sys, "argv", [word for word in command if word != "-m"]),
        mock.patch.object(sys, "path", [str(folder / Path(command[0]).parent), *sys.path]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
    ):
        try:
            if command[0] == "-m":
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    for name in set(sys.modules) - known:  # the parts of this script may have the names of another's
        if name.partition(".")[0] in ("mpizero", "tests"):  # other tests would meet two classes of one name
            continue
        if (getattr(sys.modules[name], "__file__", None) or "").startswith((str(folder), str(ROOT / "scripts"))):
            del sys.modules[name]
    assert not status, f"{' '.join(command)}: {status}"
    return out.getvalue()


@cache
def help_of(*command: str) -> str:
    return run(*command, "--help", folder=ROOT)


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, without launchers, as words."""
    lines = [line.partition(" #")[0].strip() for text in blocks(page, "sh") for line in text.splitlines()]
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return [w[w.index("python") + 1 :] if "python" in w else w for w in words]


#: Their Python needs other libraries: test_bring_your_model.py and test_recipes.py of tests/peers run it.
PEERS = {page for page in PAGES if page.stem in ("bring_your_model", "pytorch") or page.stem.startswith("from_")}


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p not in PEERS], ids=lambda p: p.name)
def test_python_of_the_docs_runs(page, tmp_path):
    """A page's blocks are one script, in a folder with some text; the first page's is also the end of a process."""
    (tmp_path / "corpus").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path / "corpus" / "text.txt")
    (tmp_path / "script.py").write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    if page != PAGES[0]:
        run("script.py", folder=tmp_path)
        return
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_page_of_examples_links_every_program():
    """A folder with ``__init__.py`` holds the parts of a program."""
    page = ROOT / "docs" / "examples.md"
    programs = (ROOT / "examples").rglob("*.py")
    linked = {(page.parent / name).resolve() for name in re.findall(r"\]\(([^)#]*\.py)\)", page.read_text("utf-8"))}
    assert {p for p in programs if not p.with_name("__init__.py").exists()} <= linked


def test_every_program_of_the_gallery_has_a_page_with_its_pictures_its_command_and_a_place_in_the_overview():
    docs = ROOT / "docs"
    programs = {p.parent.name if p.parent != GALLERY else p.stem: p for p in SCRIPTS if GALLERY in p.parents}
    assert set(programs) == {page.stem for page in (docs / "examples").glob("*.md")}
    overview = (docs / "examples.md").read_text(encoding="utf-8")
    for name, program in programs.items():
        page = docs / "examples" / f"{name}.md"
        pictures = re.findall(r"!\[[^]]+\]\(../(pictures/[\w.]+)\)", page.read_text(encoding="utf-8"))
        assert f"]({pictures[0]})](examples/{name}.md)" in overview
        assert max((docs / picture).stat().st_size for picture in pictures) < 150e3
        assert str(program.relative_to(ROOT)) in {words[0] for words in commands(page)}


def test_the_section_about_fortran_shows_lines_of_its_example():
    page = (ROOT / "docs" / "bring_your_model.md").read_text(encoding="utf-8")
    section = page.partition("## From a Fortran program")[2]
    for name, source in (("py", "heat_in_fortran.py"), ("fortran", "heat.f90")):
        program = (ROOT / "examples" / "models" / source).read_text(encoding="utf-8")
        shown = re.findall(rf"^   ```{name}\n(.*?)^   ```$", section, re.MULTILINE | re.DOTALL)
        lines = [line.strip() for text in shown for line in text.splitlines()]
        assert lines
        assert set(lines) <= {line.strip() for line in program.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_of_the_docs_exist(page):
    for words in commands(page):
        if words[:2] == ["-m", "mpizero"]:
            text = help_of(*words[: 4 if words[2] in ("bench", "checkpoint") else 3])  # what has commands of its own
        elif words[0].startswith(("scripts/", "examples/gallery/")) and words[0].endswith(".py"):
            text = help_of(words[0])
        else:
            assert not words[0].startswith("scripts/") or os.access(ROOT / words[0], os.X_OK), words[0]
            continue
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in text, f"{' '.join(words)}: no option {option}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        there = page.parent / target if target else page
        assert target.startswith("https://") or there.exists(), target
        assert not anchor or target.startswith("https://") or anchor in headings(there), f"{target}#{anchor}"


def test_timetables_of_the_docs_are_those_of_the_schedules():
    from mpizero.layout import SCHEDULES, Costs, build_schedule, simulate
    from mpizero.layout.schedules import timetable

    head = re.compile(r"(\w+): (\d+) stages(?:, (\d+) chunks each)?, (\d+) micro-batches")
    shown = [text for text in blocks(ROOT / "docs" / "pipeline.md", "") if head.match(text)]
    for text in shown:
        name, stages, chunks, micros = head.match(text).groups()
        schedule = build_schedule(name, int(stages), int(micros), int(chunks or 1))
        assert text.rstrip() == timetable(simulate(schedule, Costs.uniform(schedule.chunks))), name
    assert len(shown) == len(SCHEDULES)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_named_in_the_docs_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:scripts|docs|tests|examples|mpizero)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


def test_drawings_are_those_of_their_script(tmp_path):
    run("scripts/draw.py", "--folder", str(tmp_path), folder=ROOT)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}


def test_every_setting_is_documented_and_tables_have_its_default():
    from mpizero.train.config.optimizers import optimizer_section
    from mpizero.train.config.schema import CheckpointSection, ParallelSection, TrainSection, section_kinds

    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for section in section_kinds():
        missing = [field.name for field in dataclasses.fields(section) if f"`{field.name}`" not in text]
        assert not missing, f"docs/cli.md does not name {missing} of {section.__name__}"
    for section in (ParallelSection, TrainSection, CheckpointSection, optimizer_section("adam")):
        table = text.partition(f"### `[{section.title()}]`")[2].partition("\n#")[0]
        shown = dict(re.findall(r"^\| `(\w+)` \| `?([\w.\"/,-]+)`? \|", table, re.MULTILINE))
        for field in dataclasses.fields(section):
            default = field.metadata["off"] if field.default is None else field.default
            if field.name in shown.keys() - {"name", "schedule_steps"}:  # those of AdamW, and of train.steps
                assert tomllib.loads(f"value = {shown[field.name]}")["value"] == default, field.name


#: Its table shows settings that do not exist.
MISTAKES = ROOT / "docs" / "mistakes.md"


@pytest.mark.parametrize("page", [p for p in PAGES if p != MISTAKES], ids=lambda p: p.name)
def test_settings_of_a_configuration_that_the_docs_name_exist(page):
    from mpizero import ShardingConfig

    calls = re.findall(r"`(?:ShardingConfig|Config)\(([^`]*)\)`", page.read_text(encoding="utf-8"))
    named = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    assert named <= {field.name for field in dataclasses.fields(ShardingConfig)}


GALLERY = ROOT / "examples" / "gallery"
#: A folder with ``__init__.py`` holds the parts of a script, not scripts; Spack runs the one of that name.
SCRIPTS = [
    p
    for p in sorted([*(ROOT / "scripts").rglob("*.py"), *GALLERY.rglob("*.py")])
    if not p.with_name("__init__.py").exists() and p.parent.name != "spack"
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_say_what_they_do(script):
    assert "usage:" in help_of(str(script.relative_to(ROOT)))
