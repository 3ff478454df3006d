"""Write the pages of the API reference: one for each public name, one for each module, and the index."""

from __future__ import annotations

import inspect
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

from generator.public_names import PublicName, is_member, library_groups, public_modules, public_names

INDEX = """# API reference

Every public name, as `import mpizero as mz` has it: `Mesh` is `mz.Mesh`, `nn.GPT` is `mz.nn.GPT`.
[The library](../library.md) shows how they are used together. The pages are made from the docstrings of the version
that this site was built from.
"""


def write_reference(folder: Path) -> dict[str, str]:
    """Write the pages into ``folder``, leaving files alone that would stay the same, and remove those of old names.

    Returns
    -------
    dict of str to str
        The page of each public name and of each module, by full name, without the folder and the suffix.
    """
    names, modules = public_names(), public_modules()[1:]
    pages = page_names([*names.values()]) | {module: module.removeprefix("mpizero.") for module in modules}
    written = {f"{pages[full]}.rst": name_page(one, names) for full, one in names.items()}
    written |= {f"{pages[module]}.md": module_page(module, names, pages) for module in modules}
    written["index.md"] = index_page(names, pages)
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in written:
            path.unlink()
    for name, text in written.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return pages


def page_names(names: list[PublicName]) -> dict[str, str]:
    """Return the page of each name; pages also differ where file systems take ``Batches`` and ``batches`` for one."""
    met = Counter(one.title.lower() for one in names)
    plain = {one.full for one in names if met[one.title.lower()] == 1 or inspect.isclass(one.value)}
    return {one.full: one.title if one.full in plain else f"{one.title}_function" for one in names}


def name_page(one: PublicName, names: dict[str, PublicName]) -> str:
    """Return the page of one name, in reStructuredText.

    No table of contents has it: three hundred names in the navigation of every page would triple the time of a build.
    """
    where = [":doc:`API reference <index>`"]
    where += [f":doc:`{one.module.removeprefix('mpizero.')}`"] if one.module != "mpizero" else []
    lines = [":orphan:", "", one.title, "=" * len(one.title), "", " › ".join(where), ""]
    lines += [f".. currentmodule:: {one.module}", ""]
    if isinstance(one.value, ModuleType):
        return "\n".join([*lines, f".. automodule:: {one.full}", ""])
    if inspect.isroutine(one.value):
        return "\n".join([*lines, f".. autofunction:: {one.name}", ""])
    if not inspect.isclass(one.value):
        return "\n".join([*lines, f".. data:: {one.name}", f"   :value: {one.value!r}", ""])
    documented, mine = bases(one.value, names)
    lines += [f".. autoclass:: {one.name}", "   :members:", f"   :inherited-members: {', '.join(mine)}", ""]
    for base, members in documented.items():
        said = ", ".join(f":attr:`{member} <{base}.{member}>`" for member in members)
        lines += [f"Inherited from :class:`~{base}`: {said}", ""] if said else []
    return "\n".join(lines)


def bases(cls: type, names: dict[str, PublicName]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the members that the pages of public base classes document, and the bases that this page leaves out.

    Members of a base class that has no page of its own are documented with the class.
    """
    public = {id(one.value): full for full, one in names.items() if inspect.isclass(one.value)}
    documented: dict[str, list[str]] = {}
    left_out, seen = ["object"], set(vars(cls))
    for base in cls.__mro__[1:]:
        full = public.get(id(base))
        if full:
            ours = [one for one in reversed(base.__mro__) if one.__module__.startswith("mpizero")]
            inherited = {n: v for one in ours for n, v in vars(one).items()}
            documented[full] = sorted(n for n, v in inherited.items() if is_member(n, v) and n not in seen)
            seen |= set(inherited)
            left_out += [one.__name__ for one in base.__mro__]
        if not base.__module__.startswith("mpizero"):
            left_out.append(base.__name__)
        seen |= set(vars(base))
    return documented, sorted(set(left_out))


def table(rows: list[PublicName], pages: dict[str, str]) -> list[str]:
    """Return the lines of a table of names with links to their pages, in reStructuredText inside of Markdown."""
    lines = ["```{eval-rst}", ".. list-table::", "   :widths: 30 70", "   :class: names", ""]
    for one in rows:
        lines += [f"   * - :doc:`{one.title} <{pages[one.full]}>`", f"     - {one.summary}"]
    return [*lines, "```", ""]


def toctree(pages: list[str]) -> list[str]:
    """Return the lines of a table of contents that only the navigation shows."""
    return ["```{toctree}", ":hidden:", "", *pages, "```", ""] if pages else []


def module_page(module: str, names: dict[str, PublicName], pages: dict[str, str]) -> str:
    """Return the page of a module: what it says of itself, and its names; some may be documented at a shorter name."""
    where = {(id(one.value), one.name): one for one in names.values()}
    found = import_module(module)
    title = module.removeprefix("mpizero.")
    ours = [where.get((id(getattr(found, name)), name)) for name in getattr(found, "__all__", [])]
    rows = [one for one in dict.fromkeys(ours) if one] or [one for one in names.values() if one.module == module]
    below = [pages[m] for m in pages if m.startswith(f"{module}.") and m not in names]
    head = ["```{eval-rst}", f".. currentmodule:: {module}", "", f".. automodule:: {module}", "   :no-members:", "```"]
    return "\n".join([f"# {title}", "", *head, "", *table(rows, pages), *toctree(below)])


def index_page(names: dict[str, PublicName], pages: dict[str, str]) -> str:
    """Return the index: the names of ``mpizero`` itself in the groups of ``docs/library.md``, and the modules.

    Neighbouring groups of one name each, of which the name's own docstring says all, share a table.
    """
    of_root = {one.name: one for one in names.values() if one.module == "mpizero"}
    of_root |= {m[8:]: PublicName("mpizero", m[8:], import_module(m)) for m in pages if m not in names}
    lines: list[str] = [INDEX]
    alone: list[PublicName] = []
    for group, said in [*library_groups(), ([], "")]:
        rows = [of_root[name] for name in group if name in of_root]
        if len(rows) == 1:
            alone += rows
            continue
        lines += table(alone, pages) if alone else []
        alone = []
        said = said.replace("](#", "](../library.md#").replace("](", "](../").replace("](../../", "](../")
        lines += [f"{said[0].upper()}{said[1:]}:", "", *table(rows, pages)] if rows else []
    modules = [pages[module] for module in pages if module not in names and module.count(".") == 1]
    return "\n".join([*lines, *toctree(modules)])
