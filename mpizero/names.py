"""Which names parameters may have: those that a checkpoint can hold as they are, and a terminal can show."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import is_normalized

from mpizero.errors import ConfigError

#: Characters of a parameter's name and of a slot's at most, so that ``optimizer/<slot>/<name>`` fits a path.
NAME_LIMIT, SLOT_LIMIT, PATH_LIMIT = 440, 60, 512
#: Parts of a name, and of a path, at most: each is a group of the HDF5 file, which takes room.
NAME_PARTS, PATH_PARTS = 24, 32
RULE = (
    f"printable characters of any language (in Unicode's normal form NFC), in parts joined by /, of which none is "
    f"empty, '.' or '..' or has a space at an end; at most {NAME_LIMIT} characters in {NAME_PARTS} parts"
)


def fault_of(name: object, characters: int = NAME_LIMIT, parts: int = NAME_PARTS) -> str:
    """Say what is wrong with a name; "" if nothing is. Not collective."""
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not a string"
    if not name or len(name) > characters:
        return f"has {len(name)} characters" if name else "is empty"
    if not name.isprintable():
        hidden = next(character for character in name if not character.isprintable())
        return f"has a character that cannot be shown, U+{ord(hidden):04X}"
    if not name.isascii() and not is_normalized("NFC", name):
        return "is not in Unicode's normal form NFC (unicodedata.normalize gives it)"
    found = name.split("/")
    if len(found) > parts:
        return f"has {len(found)} parts"
    for part in found:
        if not part:
            return "has an empty part: / at an end, or twice"
        if part in (".", "..") or ".." in part.split("\\"):  # a folder's name, on some systems
            return f"has the part {part!r}"
        if part != part.strip(" "):
            return f"has the part {part!r}, with a space at an end"
    return ""


def nested_in(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names of which no file can hold both: one is the folder of the other, as with ``a`` and ``a/b``.

    Not collective. None where there are none.
    """
    before = ""
    for name in sorted(name.replace("/", "\0") for name in names):  # what lies in a folder then follows its name
        if before and name.startswith(f"{before}\0"):
            return before.replace("\0", "/"), name.replace("\0", "/")
        before = name
    return None


def check_names(names: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if parameters of these names could not be saved. Not collective."""
    listed = list(names)
    for name in listed:
        if fault := fault_of(name):
            raise ConfigError(
                f"parameter {shown(name)}: its name {fault}, so no checkpoint could hold it; give it another: {RULE}"
            )
    if found := nested_in(listed):
        raise ConfigError(
            f"parameters {found[0]!r} and {found[1]!r}: no checkpoint could hold both, for the first would also be the "
            "folder of the second; give one of them another name"
        )


def check_slots(optimizer: str, slots: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if an optimizer's state of these names could not be saved. Not collective."""
    for slot in slots:
        if fault := fault_of(slot, SLOT_LIMIT, 1):
            raise ConfigError(
                f"optimizer {optimizer}: the name {shown(slot)} of its state {fault}, so no checkpoint could hold it; "
                f"give it another name of at most {SLOT_LIMIT} printable characters, without /"
            )


def shown(name: object) -> str:
    """Return a name for messages: quoted, on one line, not too long. Not collective."""
    text = repr(name)  # which escapes what cannot be shown
    return text if len(text) <= 80 else f"{text[:80]}..."


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'weight'?)"`` with the known name most like ``name``, or "" without one.

    Not collective. For the end of a message about a name that is unknown; upper and lower case count as alike.
    """
    import difflib  # wanted only when something is wrong already

    alike: dict[str, str] = {}
    for text in known:
        alike.setdefault(text.lower(), text)
    found = difflib.get_close_matches(str(name).lower(), alike, n=1)
    return f" (did you mean {shown(alike[found[0]])}?)" if found else ""
