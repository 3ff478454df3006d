"""Rewrite links of Markdown pages for the site, and show the programs that they lead to as pages of their own.

On a code host ``../examples/lbfgs.py`` and ``docs/gpu.md`` lead to files. On the site they lead to pages: a file
outside of ``docs/`` becomes a page that shows it, a folder a page that lists its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
#: Where pages of programs are written, relative to ``docs/``.
PROGRAMS = "programs"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
INCLUDED = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
#: Files whose text has a page of the site already.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".f90": "fortran", ".c": "c"}


def rewritten(text: str, page: str, home: Path | None = None) -> str:
    """Return a page's text with included files in place and links that lead to pages of the site.

    Parameters
    ----------
    text : str
        Markdown.
    page : str
        The page of the site, relative to ``docs/``.
    home : Path or None
        The folder to which links of the text are relative; None is the page's.
    """
    here = (DOCS / page).parent

    def included(match: re.Match[str]) -> str:
        path = (here / match[1]).resolve()
        return rewritten(path.read_text(encoding="utf-8"), page, path.parent)

    def led(match: re.Match[str]) -> str:
        path = (home or here).joinpath(match[2]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # Sphinx says what is wrong with it
        return match[1] + posixpath.relpath(on_site(path), posixpath.dirname(page) or ".") + match[3]

    return INCLUDED.sub(included, LINK.sub(led, text))


def on_site(path: Path) -> str:
    """Return what a file or folder of the repository is on the site, relative to ``docs/``."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"{PROGRAMS}/{name}.rst")


def write_programs() -> None:
    """Write a page for every file and folder outside of ``docs/`` that a page of ``docs/`` or the README links."""
    folder = DOCS / PROGRAMS
    written: dict[Path, str] = {}
    for page in [*(ROOT / name for name in PAGES), *DOCS.glob("*.md"), *DOCS.glob("examples/*.md")]:
        for target in (match[1] for match in LINK.findall(page.read_text(encoding="utf-8"))):
            path = page.parent.joinpath(target).resolve()
            if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
                add(path, written)
    for old in [path for path in folder.rglob("*.rst") if path not in written]:
        old.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def add(path: Path, written: dict[Path, str]) -> None:
    """Add the page of a file or folder, and of what a folder holds, to what is written."""
    name = path.relative_to(ROOT).as_posix()
    page = DOCS / on_site(path)
    if name in PAGES or page in written:
        return
    head = [":orphan:", "", name, "=" * len(name), ""]
    if path.is_dir():
        files = [one for one in sorted(path.rglob("*")) if one.suffix in LANGUAGES]
        written[page] = "\n".join([*head, *(f"* :doc:`/{on_site(one)[:-4]}`" for one in files), ""])
        for one in files:
            add(one, written)
        return
    there = posixpath.relpath(path.as_posix(), page.parent.as_posix())
    language = LANGUAGES.get(path.suffix, "text")
    lines = [f":download:`Download <{there}>`", "", f".. literalinclude:: {there}", f"   :language: {language}", ""]
    written[page] = "\n".join(head + lines)
