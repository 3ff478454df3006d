"""Load a function of the user's that a setting names, such as ``model.make = "my_model.py:make"``, and call it.

[Note: modules by file] A file is loaded once in a process, as a module with a name of its own: that of the file and a
hash of its path and content. Two files of one name do not replace each other, and a file that was changed is loaded
again. The import system does it, so that threads wait for each other, and a module whose code raises is left out of
``sys.modules``. Pickle, ``inspect`` and dataclasses find the module by its name. The file's folder is on ``sys.path``
while the module is loaded, and in the ``with`` block of :func:`importable`, so that its siblings can be imported.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from mpizero._util.checks import home_path
from mpizero._util.names import nearest
from mpizero._util.text import is_users, users_line
from mpizero.errors import ConfigError, MpizeroError
from mpizero.train.config.setting_checks import SettingError, rejected

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class UserFunction:
    """Describe a function of the user's by the setting that names it.

    Attributes
    ----------
    section : str
        The section with the setting ``make``: "model" or "data".
    make : str
        ``"FILE.py:FUNCTION"`` or ``"PACKAGE.MODULE:FUNCTION"``.
    folder : Path
        The folder where a relative path of the file starts.
    """

    section: str
    make: str
    folder: Path

    @property
    def key(self) -> str:
        """Name of the setting."""
        return f"{self.section}.make"

    @property
    def place(self) -> str:
        """The file or module, as the setting names it."""
        return self.make.rpartition(":")[0].strip()

    @property
    def file(self) -> Path | None:
        """Absolute path of the file; None if the setting names a module."""
        try:
            path = home_path(self.place)
        except ConfigError:
            raise self.reject("there is no such home folder; give the whole path") from None
        return self.folder / path if path.suffix == ".py" or path.name != self.place else None

    def reject(self, message: str) -> SettingError:
        """Return the error about this setting; ``message`` says what is wrong, or what is allowed."""
        return rejected(self.key, self.make, message)

    def load(self) -> Callable[..., Any]:
        """Return the function, whose module is loaded if it is not yet. Not collective.

        Raises
        ------
        SettingError
            If there is no such file, module or function, or the module's code raises an error.
        """
        name = self.make.rpartition(":")[2]
        found = self._module()
        if not hasattr(found, name):
            defined = [
                n for n, v in vars(found).items() if callable(v) and getattr(v, "__module__", "") == found.__name__
            ]
            listed = f"; it defines {', '.join(defined)}" if defined else ""
            raise self.reject(f"{self.place} has no function {name}{nearest(name, defined)}{listed}")
        function: Callable[..., Any] = getattr(found, name)
        if not callable(function):
            raise self.reject(f"{name} is a {type(function).__name__}, which cannot be called; it must be a function")
        return function

    def call(self, arguments: Mapping[str, Any], offered: Mapping[str, Callable[[], Any]]) -> Any:
        """Call the function with keyword arguments, and return what it returns. Not collective.

        ``arguments`` are the section's keys. ``offered`` has functions that return further arguments by name. Each is
        called, and its value passed, if the function has a parameter of that name and the section no such key.

        Raises
        ------
        SettingError
            If the function does not take the arguments, needs others, or raises an error. The message names the key,
            and the line of the function that raised.
        """
        function = self.load()
        takes = self._check_arguments(function, arguments, offered)
        given = dict(arguments) | {
            name: get() for name, get in offered.items() if name in takes and name not in arguments
        }
        with importable(self):
            try:
                return function(**given)
            except (Exception, SystemExit) as error:
                raise self._failed(f"{self.make.rpartition(':')[2]} raised ", error) from error

    def _check_arguments(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], offered: Mapping[str, Any]
    ) -> list[str]:
        """Return the names of the function's parameters, or raise an error if it cannot take the arguments."""
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
                return importlib.import_module(self.place) if path is None else _loaded(path)
        except OSError as error:
            if path is None or path.is_file():
                raise self._failed("its module raised ", error) from error
            here = Path.cwd() / self.place
            hint = f"; {here} is there, but paths start at the configuration file's folder" if here.is_file() else ""
            raise self.reject(f"no file {path}{hint}") from None
        except ModuleNotFoundError as error:
            if path is not None or error.name is None or not f"{self.place}.".startswith(f"{error.name}."):
                raise self._failed("its module raised ", error) from error
            hint = (
                f"; for a file give its path, {self.place}.py" if (self.folder / f"{self.place}.py").is_file() else ""
            )
            raise self.reject(f"no module {self.place}{hint}") from None
        except (Exception, SystemExit) as error:
            raise self._failed("its module raised ", error) from error

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of the function's file and of all loaded modules of its folder, by file name.

        Not collective.
        """
        home = Path(getattr(self._module(), "__file__", None) or "").parent
        found = {}
        for module in list(sys.modules.values()):
            path = Path(getattr(module, "__file__", None) or "")
            if path.parent == home and path.suffix == ".py":
                with suppress(OSError):
                    found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def _failed(self, what: str, error: BaseException) -> SettingError:
        line = None if isinstance(error, SyntaxError) else users_line(error.__traceback__)
        text = " ".join(str(error).split()) or "no further description"
        told = f"{what}{type(error).__name__}: {text}" + (f" ({line})" if line and str(line) not in text else "")
        failure = self.reject(told)
        if isinstance(error, MpizeroError):
            failure.status = error.status
        return failure


@contextmanager
def importable(*functions: UserFunction) -> Iterator[None]:
    """Keep the folders of the functions' files at the beginning of ``sys.path`` during a ``with`` block."""
    folders = [str(function.folder if function.file is None else function.file.parent) for function in functions]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # the user's code has removed it
                sys.path.remove(folder)


class _UncachedLoader(SourceFileLoader):
    """Load a module from its source, without a file of byte code: one could be that of an earlier content."""

    def path_stats(self, path: Any) -> Any:
        """Raise OSError, by which the import system learns that there is no byte code."""
        raise OSError(path)


class _Finder:
    """Find one file as a module with a given name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how to load the file if ``name`` is its module's, else None. Not collective."""
        if name != self.name:
            return None
        return spec_from_file_location(name, self.path, loader=_UncachedLoader(name, str(self.path)))


def _loaded(path: Path) -> ModuleType:
    """Return the module of a file; load it if it is not loaded yet ([Note: modules by file])."""
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
    """Remove modules from ``sys.modules`` that another folder's file has imported, and this folder has under that name.

    Otherwise ``import helper`` would give this folder's files the helper of the other one.
    """
    for path in folder.glob("*.py"):
        known = getattr(sys.modules.get(path.stem), "__file__", None)
        if known and is_users(known) and Path(known).parent != folder and str(Path(known).parent) not in sys.path:
            del sys.modules[path.stem]
