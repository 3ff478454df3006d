"""Define the command ``mpizero completion``: a script by which a shell completes what the command line takes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mpizero.errors import ConfigError, ExitStatus

SHELLS = ("bash", "zsh", "fish")
#: Words of the help for arguments that are files, and for those that are folders.
_FILES = ("CONFIG.toml", "FILE", "FILE.safetensors", "OUT", "PATH")
_FOLDERS = ("CHECKPOINT", "DIR", "DUMP", "FOLDER", "RUN", "RUN_OR_CHECKPOINT")
_SETTING = "SECTION.KEY=VALUE"
#: Functions that offer settings. bash adds a space after a word unless the function that is registered forbids it.
_OFFER_SETTINGS = {
    "bash": """_mpizero_settings() {{ compgen -W "{settings}" -- "$1"; }}
_mpizero_completion() {{
  _shtab_mpizero "$@"
  if [[ ${{COMPREPLY[0]-}} == *= ]]; then compopt -o nospace; fi
}}""",
    "zsh": "_mpizero_settings() {{ compadd -S '' -- {settings} }}",
}


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero completion`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands, options, files and settings",
        description="Print a script for a shell to load. It is made of the options of this version, and starts no "
        "Python when it completes. Needs the extra `completion`.",
        epilog="Example: mpizero completion bash > ~/.local/share/bash-completion/completions/mpizero",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for ``options.shell`` that completes what ``parser`` accepts; return the exit status.

    Raises
    ------
    ConfigError
        If shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ConfigError("mpizero completion needs shtab: pip install 'mpizero[completion]'") from None
    known = " ".join(settings())
    offered = {"bash": "_mpizero_settings", "zsh": "_mpizero_settings", "fish": known}
    for action in _actions(parser):
        if action.metavar == _SETTING:
            action.complete = offered  # type: ignore[attr-defined]  # the attribute that shtab reads
        elif action.metavar in (*_FILES, *_FOLDERS):
            action.complete = shtab.FILE if action.metavar in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    preamble = _OFFER_SETTINGS.get(options.shell, "").format(settings=known)
    script = shtab.complete(parser, options.shell, preamble=preamble)
    if options.shell == "bash":
        script = script.replace("-F _shtab_mpizero mpizero", "-F _mpizero_completion mpizero")
    sys.stdout.write(script)
    return int(ExitStatus.OK)


def settings() -> list[str]:
    """Return all settings of a configuration file as ``--set`` wants them: ``section.key=``."""
    from mpizero.train.config.components import MODELS, DataSection
    from mpizero.train.config.schema import OPTIMIZERS, Config

    sections: dict[str, list[Any]] = {"data": [DataSection], "model": [*MODELS.values()]}
    sections["optimizer"] = [*OPTIMIZERS.values()]
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.default):
            sections.setdefault(field.name, []).append(field.default)
    return sorted(
        {f"{name}.{key.name}=" for name, made in sections.items() for one in made for key in dataclasses.fields(one)}
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # argparse has no public way to them; shtab goes the same
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                command.description = listed.help  # which shells show beside the command: one line
                yield from _actions(command)
