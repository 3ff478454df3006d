"""Read a configuration file and ``--set`` overrides; errors name the key, file and line, and what is allowed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpizero._util.names import nearest
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ConfigError
from mpizero.train.config.data_sections import DataSection, MadeDataSection
from mpizero.train.config.loop_section import ALL_SAMPLES
from mpizero.train.config.model_sections import MODELS, MadeModelSection, ModelSection, NamedModelSection
from mpizero.train.config.parallel_section import ParallelSection
from mpizero.train.config.sections import OPTIMIZERS, CheckpointSection, Config, OptimizerSection, TrainSection
from mpizero.train.config.setting_checks import SettingError, rejected, shown
from mpizero.train.config.vector_sections import VectorMethodSection

Tables = dict[str, dict[str, Any]]
_CONFIG_LIMIT = 1 << 20
#: All sections; that of the ensemble is read by :mod:`mpizero.train.cli.ensemble_training` alone.
SECTIONS = ("model", "data", "parallel", "train", "optimizer", "checkpoint", "ensemble")
#: The classes of sections, among which one is suggested for a key that stands in the wrong section.
_CLASSES = (TrainSection, ParallelSection, CheckpointSection, DataSection, *OPTIMIZERS.values(), *MODELS.values())


@dataclass(frozen=True)
class ConfigDocument:
    """Hold the path and the text of a configuration file, and the settings that replace some in it.

    Attributes
    ----------
    name : str
        Path of the file, for error messages.
    text : str
        The file's text, TOML.
    overrides : sequence of str
        Texts ``section.key=value``, each of which replaces or adds one setting. Values are TOML; a bare word is a
        string.
    values : mapping
        Values by key, such as "optimizer.lr", which replace or add settings after all overrides: those of one member of
        the ensemble that the text describes.
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
            located = ConfigError(f"{self.place(error.key)}: {error.message}")
            located.status = error.status
            raise located from error.__cause__

    def place(self, key: str) -> str:
        """Return where a key such as ``train.steps`` was set: "--set", or the file's name and, if found, the line.

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
        If the file cannot be read. The message names the file and the reason.
    """
    try:
        with Path(name).open("rb") as file:  # bounded while it is read: what is no regular file has no size
            data = file.read(_CONFIG_LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > _CONFIG_LIMIT:
        raise ConfigError(f"{name}: more than {_CONFIG_LIMIT} bytes: not a configuration")
    try:
        return data.decode("utf-8-sig")  # some editors write a mark of byte order
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: not UTF-8 at byte {error.start}") from None


def read_together(
    comm: Communicator, name: str, overrides: Sequence[str], preset: Mapping[str, str]
) -> tuple[ConfigDocument, Config]:
    """Read a configuration file on rank 0 and parse it on all ranks; return the document and the configuration.

    Collective over ``comm``. ``preset`` has values, as TOML texts by key such as ``train.threads``, of settings that
    are neither in the file nor in ``overrides``.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a setting is wrong. The message names the key, file and line, and what is
        allowed.
    """
    with all_ranks(comm):
        text = read_config(name) if comm.rank == 0 else ""
    document = ConfigDocument(name, comm.broadcast_object(text), overrides)
    return document, parse_config(document, preset)


def parse_config(document: ConfigDocument, defaults: Mapping[str, str] | None = None) -> Config:
    """Parse and check a configuration document.

    Not collective.

    Parameters
    ----------
    document : ConfigDocument
        The TOML text with its overrides.
    defaults : mapping of str to str, optional
        Values, as TOML texts by key such as ``train.threads``, of settings that are neither in the text nor in an
        override.

    Raises
    ------
    ConfigError
        If a setting is wrong. The message names the key, its value, file and line, and what is allowed.
    """
    tables = tables_of(document)
    with document.located():
        for key, value in (defaults or {}).items():
            section, _, setting = key.partition(".")
            if isinstance(tables.get(section, {}), dict) and setting not in tables.get(section, {}):
                _apply(tables, f"{key}={value}")
        return config_of(tables, str(Path(document.name).parent.absolute()))


def tables_of(document: ConfigDocument) -> Tables:
    """Return the tables of a configuration document, with its overrides, unchecked. Not collective."""
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


def config_of(tables: Tables, folder: str = ".") -> Config:
    """Build a checked configuration from the tables of a TOML file, or from the result of :meth:`Config.to_dict`.

    Not collective. ``folder`` is that of the configuration file.

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
    optimizer = _chosen(tables, "optimizer", OptimizerSection, OPTIMIZERS, "adamw")
    if issubclass(optimizer, VectorMethodSection):  # their number is known when the data are open
        tables = tables | {"train": {"global_batch": ALL_SAMPLES} | tables.get("train", {})}
    return Config(
        model=_model(tables),
        data=MadeDataSection.of(tables["data"]) if "make" in tables["data"] else _section(DataSection, tables),
        parallel=_section(ParallelSection, tables),
        train=_section(TrainSection, tables),
        optimizer=_section(optimizer, tables, OPTIMIZERS),
        checkpoint=_section(CheckpointSection, tables),
        folder=folder,
    )


def _model(tables: Tables) -> ModelSection:
    given = tables["model"]
    names = ", ".join(map(shown, MODELS))
    if "make" not in given:
        if "name" not in given:
            message = f'model.name is missing: it must be one of {names}; or give model.make = "my_model.py:make"'
            raise SettingError("model", message)
        section: ModelSection = _section(_chosen(tables, "model", NamedModelSection, MODELS, ""), tables, MODELS)
        return section
    if "name" in given:
        raise rejected("model.name", given["name"], "must be left out with model.make, which makes the model")
    return MadeModelSection.of(given)


def _chosen(tables: Tables, section: str, base: Any, kinds: Mapping[str, Any], default: str) -> Any:
    name = tables.get(section, {}).get("name", default)
    check = next(item for item in fields(base) if item.name == "name").metadata["check"]
    try:
        return kinds[check(name)]
    except ValueError as error:
        raise rejected(f"{section}.name", name, str(error)) from None


def _section(kind: Any, tables: Tables, kinds: Mapping[str, Any] | None = None) -> Any:
    title = kind.title()
    given = tables.get(title, {})
    known = [item.name for item in fields(kind)]
    for key in (key for key in given if key not in known):
        having = [other for other in _CLASSES if key in {item.name for item in fields(other)}]
        owners = [name for name, other in (kinds or {}).items() if other in having]
        whose = f"not a setting of {given.get('name', 'adamw')} but of {', '.join(owners)}" if owners else "unknown key"
        hint = "" if owners else f" (did you mean '{having[0].title()}.{key}'?)" if having else nearest(key, known)
        raise SettingError(f"{title}.{key}", f"{title}.{key}: {whose}{hint}; known: {', '.join(known)}")
    return kind(**given)
