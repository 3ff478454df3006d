"""Read a configuration file and ``--set`` overrides, and import the user's functions that the configuration names.

:func:`read_config` reads a file, and :func:`parse_config` converts a :class:`ConfigDocument` to a
:class:`~mpizero.train.config.schema.RunConfig`; errors name the key, file and line, and what is allowed.
:class:`UserFunction` imports and calls a function such as ``model.make = "my_model.py:make"``.

[Note: modules by file] A user's file is imported once in a process, as a module whose name consists of the file's name
and a hash of its path and content. So two files of one name do not replace each other, and a file that was changed is
imported again. Files are imported by Python's import system, so threads wait for each other, and a module whose code
raises is not left in ``sys.modules``. Pickle, ``inspect`` and dataclasses find the module by its name. The file's
folder is on ``sys.path`` while the module is imported, and in the ``with`` block of :func:`importable`, so that modules
in that folder can be imported.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from mpizero._util.checks import home_path
from mpizero._util.names import nearest
from mpizero._util.settings import ConfigSection, SettingError, allowed, rejected, shown
from mpizero._util.text import is_users, users_line
from mpizero.errors import ConfigError, MpizeroError
from mpizero.train.config.optimizers import OPTIMIZERS, OptimizerSection, VectorMethodSection, optimizer_section
from mpizero.train.config.schema import ALL_SAMPLES, RunConfig, section_kind, section_kinds
from mpizero.train.config.sections import MODELS, MakeSettings, NamedModelSection

Tables = dict[str, dict[str, Any]]
_CONFIG_LIMIT = 1 << 20
#: All sections of a configuration; ``[ensemble]`` is read only by :mod:`mpizero.cli.train`.
SECTIONS = ("model", "data", "parallel", "train", "optimizer", "checkpoint", "ensemble")


@dataclass(frozen=True)
class ConfigDocument:
    """Hold the path and the text of a configuration file, and settings that replace settings of the file.

    Attributes
    ----------
    name : str
        Path of the file, for error messages.
    text : str
        Content of the file, in TOML.
    overrides : sequence of str
        Texts ``section.key=value``, each of which replaces or adds one setting. Values are TOML; a bare word is a
        string.
    values : mapping
        Settings of one member of an ensemble: values by key, such as "optimizer.lr", which replace or add settings
        after all ``overrides``.
    """

    name: str
    text: str
    overrides: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Convert a :class:`SettingError` of the ``with`` block to a ConfigError with the setting's file and line.

        Not collective.
        """
        try:
            yield
        except SettingError as error:  # one of a user's function has the error that was raised there as its cause
            located = ConfigError(f"{self.path_or_module(error.key)}: {error.message}")
            located.status = error.status
            raise located from error.__cause__

    def path_or_module(self, key: str) -> str:
        """Return where a key such as ``train.steps`` was set: "--set", "ensemble.each", or file and line if found.

        Not collective.
        """
        names = [override.partition("=")[0].strip() for override in self.overrides]
        if any(name == key or name.startswith(f"{key}.") for name in names):
            return "--set"
        if key in self.values:
            return f"{self.name}, ensemble.each"
        section, _, setting = key.partition(".")
        inside = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
                inside = header[1]
                if not setting and inside == section:
                    return f"{self.name}:{number}"
            elif setting and re.match(rf"""\s*["']?{re.escape(setting)}["']?\s*[=.]""", line) and inside == section:
                return f"{self.name}:{number}"
        return self.name


def read_config(name: str) -> str:
    """Return the text of the configuration file at the path ``name``.

    Not collective.

    Raises
    ------
    ConfigError
        If the file cannot be read, is larger than 1 MiB, or is not UTF-8. The message names the file and the reason.
    """
    try:
        with Path(name).open("rb") as file:  # the size is limited in read(): other than regular files have no size
            data = file.read(_CONFIG_LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > _CONFIG_LIMIT:
        raise ConfigError(f"{name}: more than {_CONFIG_LIMIT} bytes: not a configuration")
    try:
        return data.decode("utf-8-sig")  # some editors write a mark of byte order
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: not UTF-8 at byte {error.start}") from None


def parse_config(document: ConfigDocument, threads: int | None = None) -> RunConfig:
    """Parse and check a configuration document.

    Not collective.

    Parameters
    ----------
    document : ConfigDocument
        The TOML text with its overrides.
    threads : int, optional
        Value of ``train.threads`` if neither the text nor an override sets it.

    Raises
    ------
    ConfigError
        If a setting is wrong. The message names the key, its value, file and line, and what is allowed.
    """
    tables = tables_of(document)
    with document.located():
        if threads is not None and isinstance(train := tables.setdefault("train", {}), dict):
            train.setdefault("threads", threads)
        return config_of(tables, str(Path(document.name).parent.absolute()))


def tables_of(document: ConfigDocument) -> Tables:
    """Parse a configuration document, apply its overrides, and return the unchecked tables. Not collective."""
    try:
        tables: Tables = tomllib.loads(document.text)
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and deep nesting
        raise ConfigError(f"{document.name}: not valid TOML: {error}") from None
    with document.located():
        for override in document.overrides:
            _apply(tables, override)
        for key, value in document.values.items():
            _put(tables, f"ensemble.each.{key}", key.split("."), value)
    return tables


def _apply(tables: Tables, override: str) -> None:
    key, equals, raw = override.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {override}: must have the form section.key=value")
    _put(tables, f"--set {override}", path, _value(override, raw.strip()))


def _put(tables: Tables, origin: str, path: Sequence[str], value: Any) -> None:
    target: Any = tables
    for part in path[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise ConfigError(f"{origin}: {'.'.join(path[:-1])} is a value, not a table")
    target[path[-1]] = value


def _value(override: str, raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError) as error:
        if raw and raw[0] not in "[{\"'" and "\n" not in raw:
            return raw
        raise ConfigError(f"--set {override}: not a TOML value: {error}") from None
    if set(parsed) != {"value"}:
        raise ConfigError(f"--set {override}: must be one value")
    return parsed["value"]


def config_of(tables: Tables, folder: str = ".") -> RunConfig:
    """Build a checked configuration from the tables of a TOML file, or from the result of :meth:`RunConfig.to_dict`.

    Not collective. ``folder`` is the folder of the configuration file.

    Raises
    ------
    ConfigError
        If a setting is wrong. The message names the key, its value and what is allowed.
    """
    for section, content in tables.items():
        if section not in SECTIONS:
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            raise SettingError(section, f"{section}: unknown section{nearest(section, SECTIONS)}; known: {known}")
        if not isinstance(content, dict):
            raise rejected(section, content, f"must be a section: [{section}] with its settings below it")
    for section in ("model", "data"):
        if section not in tables:
            raise SettingError(section, f"[{section}] is missing: it has no default")
    _check_name(tables, "optimizer", OptimizerSection, "adamw")
    if issubclass(section_kind("optimizer", tables), VectorMethodSection):  # their number is known with the data
        tables = tables | {"train": {"global_batch": ALL_SAMPLES} | tables.get("train", {})}
    _check_model(tables["model"], tables)
    return RunConfig(**{title: _section(title, tables) for title in SECTIONS if title != "ensemble"}, folder=folder)


def _check_model(table: Mapping[str, Any], tables: Tables) -> None:
    if "make" in table and "name" in table:
        raise rejected("model.name", table["name"], "must be left out with model.make, which makes the model")
    if "make" not in table and "name" not in table:
        names = ", ".join(map(shown, MODELS))
        message = f'model.name is missing: it must be one of {names}; or give model.make = "my_model.py:make"'
        raise SettingError("model", message)
    if "make" not in table:
        _check_name(tables, "model", NamedModelSection, "")


def _check_name(tables: Tables, title: str, base: type[ConfigSection], default: str) -> None:
    """Raise SettingError if ``name`` of the section ``title``, such as ``optimizer.name``, has an unknown value."""
    name = tables.get(title, {}).get("name", default)
    check = next(item for item in fields(base) if item.name == "name").metadata["check"]
    try:
        check(name)
    except ValueError as error:
        raise rejected(f"{title}.name", name, allowed(error)) from None


def _section(title: str, tables: Tables) -> Any:
    kind, table = section_kind(title, tables), tables.get(title, {})
    if issubclass(kind, MakeSettings):
        return kind.of(table)
    known = [item.name for item in fields(kind)]
    for key in (key for key in table if key not in known):
        raise SettingError(
            f"{title}.{key}", f"{title}.{key}: {_unknown(title, key, table, known)}; known: {', '.join(known)}"
        )
    return kind(**table)


def _unknown(title: str, key: str, table: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return a message about an unknown key: the models, optimizers or section that have it, or the nearest key."""
    named: Mapping[str, type[ConfigSection]] = MODELS if title == "model" else {}
    if title == "optimizer":
        named = {name: optimizer_section(name) for name in OPTIMIZERS}
    if owners := [name for name, kind in named.items() if key in _keys(kind)]:
        return f"not a setting of {table.get('name', 'adamw')} but of {', '.join(owners)}"
    having = [kind for kind in section_kinds() if key in _keys(kind)]
    return f"unknown key (did you mean '{having[0].title()}.{key}'?)" if having else f"unknown key{nearest(key, known)}"


def _keys(kind: type[ConfigSection]) -> set[str]:
    return {item.name for item in fields(kind)}


_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class UserFunction:
    """Import and call a function of the user that ``model.make`` or ``data.make`` names.

    Attributes
    ----------
    section : str
        The section with the setting ``make``: "model" or "data".
    make : str
        Value of the setting: ``"FILE.py:FUNCTION"`` or ``"PACKAGE.MODULE:FUNCTION"``.
    folder : Path
        The folder to which a path in ``make`` is relative.
    """

    section: str
    make: str
    folder: Path

    @property
    def key(self) -> str:
        """Key of the setting: "model.make" or "data.make"."""
        return f"{self.section}.make"

    @property
    def path_or_module(self) -> str:
        """The path of the file, or the name of the module, as in ``make``."""
        return self.make.rpartition(":")[0].strip()

    @property
    def file(self) -> Path | None:
        """Absolute path of the file; None if the setting names a module."""
        try:
            path = home_path(self.path_or_module)
        except ConfigError:
            raise self.reject("there is no such home folder; give the whole path") from None
        return self.folder / path if path.suffix == ".py" or path.name != self.path_or_module else None

    def reject(self, message: str) -> SettingError:
        """Return a SettingError about this setting; ``message`` says what is wrong, or what is allowed."""
        return rejected(self.key, self.make, message)

    def load(self) -> Callable[..., Any]:
        """Import the module of the function if needed, and return the function. Not collective.

        Raises
        ------
        SettingError
            If there is no such file, module or function, or the module's code raises an error.
        """
        name = self.make.rpartition(":")[2]
        module = self._module()
        if not hasattr(module, name):
            defined = [
                n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
            ]
            listed = f"; it defines {', '.join(defined)}" if defined else ""
            raise self.reject(f"{self.path_or_module} has no function {name}{nearest(name, defined)}{listed}")
        function: Callable[..., Any] = getattr(module, name)
        if not callable(function):
            raise self.reject(f"{name} is a {type(function).__name__}, which cannot be called; it must be a function")
        return function

    def call(self, arguments: Mapping[str, Any], offered: Mapping[str, Callable[[], Any]]) -> Any:
        """Call the function with keyword arguments, and return what it returns. Not collective.

        ``arguments`` are the section's keys and values. ``offered`` maps names of further arguments to functions that
        return their values; such a value is passed if the user's function has a parameter of that name, and the name is
        not among ``arguments``.

        Raises
        ------
        SettingError
            If the function does not take the arguments, needs others, or raises an error. The message names the key,
            and the line of code that raised the error.
        """
        function = self.load()
        takes = self._check_arguments(function, arguments, offered)
        keywords = dict(arguments) | {
            name: get() for name, get in offered.items() if name in takes and name not in arguments
        }
        with importable(self):
            try:
                return function(**keywords)
            except (Exception, SystemExit) as error:
                raise self._failed(f"{self.make.rpartition(':')[2]} raised ", error) from error

    def _check_arguments(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], offered: Mapping[str, Any]
    ) -> list[str]:
        """Return the names of the parameters of ``function``; raise SettingError if it cannot take the arguments."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # of compiled code
            return []
        names = [parameter.name for parameter in parameters if parameter.kind in _KEYWORDS]
        takes = f"it takes {', '.join(names)}" if names else "it takes no arguments"
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for key in arguments:
            if key not in names and not takes_all:
                message = f"{self.section}.{key}: {self.make} takes no such key{nearest(key, names)}; {takes}"
                raise SettingError(f"{self.section}.{key}", message)
        for parameter in parameters:
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if needed and (parameter.kind not in _KEYWORDS or parameter.name not in {*arguments, *offered}):
                by = "by position" if parameter.kind not in _KEYWORDS else f"as {self.section}.{parameter.name}"
                raise self.reject(
                    f"it needs {parameter.name}, which is not given {by}; {takes}, from keys of its section"
                )
        return names

    # ------------------------------------------------------------------ modules

    def _module(self) -> ModuleType:
        path = self.file
        try:
            with importable(self):
                return importlib.import_module(self.path_or_module) if path is None else _loaded(path)
        except OSError as error:
            if path is None or path.is_file():
                raise self._failed("its module raised ", error) from error
            candidate = Path.cwd() / self.path_or_module
            hint = (
                f"; {candidate} is there, but paths start at the configuration file's folder"
                if candidate.is_file()
                else ""
            )
            raise self.reject(f"no file {path}{hint}") from None
        except ModuleNotFoundError as error:
            if path is not None or error.name is None or not f"{self.path_or_module}.".startswith(f"{error.name}."):
                raise self._failed("its module raised ", error) from error
            hint = (
                f"; for a file give its path, {self.path_or_module}.py"
                if (self.folder / f"{self.path_or_module}.py").is_file()
                else ""
            )
            raise self.reject(f"no module {self.path_or_module}{hint}") from None
        except (Exception, SystemExit) as error:
            raise self._failed("its module raised ", error) from error

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of the function's file and of all loaded modules of its folder, by file name.

        Not collective.
        """
        home = Path(getattr(self._module(), "__file__", None) or "").parent
        hashes = {}
        for module in list(sys.modules.values()):
            path = Path(getattr(module, "__file__", None) or "")
            if path.parent == home and path.suffix == ".py":
                with suppress(OSError):
                    hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return hashes

    def _failed(self, what: str, error: BaseException) -> SettingError:
        line = None if isinstance(error, SyntaxError) else users_line(error.__traceback__)
        text = " ".join(str(error).split()) or "no further description"
        message = f"{what}{type(error).__name__}: {text}" + (f" ({line})" if line and str(line) not in text else "")
        failure = self.reject(message)
        if isinstance(error, MpizeroError):
            failure.status = error.status
        return failure


@contextmanager
def importable(*functions: UserFunction) -> Iterator[None]:
    """Insert the folders of the functions' files at the beginning of ``sys.path`` for a ``with`` block.

    For a function that is named by a module, not by a file, the configuration file's folder is inserted.
    """
    folders = [str(function.folder if function.file is None else function.file.parent) for function in functions]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # the user's code has removed it
                sys.path.remove(folder)


class _UncachedLoader(SourceFileLoader):
    """Load a module from its source file; ignore cached byte code, which could be that of earlier source code."""

    def path_stats(self, path: Any) -> Any:
        """Raise OSError, which tells the import system that there is no cached byte code."""
        raise OSError(path)


class _Finder:
    """Let the import system import one file as a module with a given name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the module's spec if ``name`` is its name, else None. Not collective."""
        if name != self.name:
            return None
        return spec_from_file_location(name, self.path, loader=_UncachedLoader(name, str(self.path)))


def _loaded(path: Path) -> ModuleType:
    """Return the module of a file; import the file if it is not imported yet ([Note: modules by file])."""
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest[:12]}"
    if name not in sys.modules:
        _forget_siblings_of_others(path.parent)
    finder = _Finder(name, path)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)


def _forget_siblings_of_others(folder: Path) -> None:
    """Remove user modules of other folders from ``sys.modules`` if ``folder`` has files of the same names.

    Otherwise ``import helper`` in a file of ``folder`` would return the module ``helper`` of another folder. Modules
    of folders that are on ``sys.path`` stay.
    """
    for path in folder.glob("*.py"):
        known = getattr(sys.modules.get(path.stem), "__file__", None)
        if known and is_users(known) and Path(known).parent != folder and str(Path(known).parent) not in sys.path:
            del sys.modules[path.stem]
