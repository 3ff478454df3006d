"""Load chosen parameters from a file, on any layout: each rank reads the ranges that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.names import as_patterns, nearest, selected
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.convert import ImportRules, ParameterFile, loadable, open_parameters
from mpizero.checkpoint.inspect import short_name
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.errors import CheckpointError, ConfigError
from mpizero.parallel.checkpointing.model_state import parameter_arrays
from mpizero.parallel.checkpointing.restore import fill

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine


@dataclass(frozen=True)
class LoadReport:
    """Say which parameters of a model were loaded from a file, and which were not.

    Attributes
    ----------
    path : str
        The file.
    taken : tuple of str
        Parameters that were loaded.
    left : tuple of str
        Parameters of the model that the patterns do not choose.
    missing : tuple of str
        Chosen parameters that the file does not have.
    different : mapping of str to str
        Chosen parameters that have another shape or type in the file, and how they differ.
    unused : tuple of str
        Parameters of the file, by their names there, that the model does not have.
    """

    path: str
    taken: tuple[str, ...]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    different: Mapping[str, str]
    unused: tuple[str, ...]

    @property
    def told(self) -> bool:
        """True if something was not loaded, so that rank 0 has printed this report."""
        return bool(self.left or self.missing or self.different)

    def __str__(self) -> str:
        """Describe the report in one line for each kind of parameters that there are."""
        count = len(self.taken) + len(self.left) + len(self.missing) + len(self.different)
        lines = [f"{len(self.taken)} of {count} parameters loaded from {self.path}"]
        for what, names in (("left as they were", self.left), ("not in the file", self.missing)):
            lines += [f"{what}: {_some(names)}"] if names else []
        if self.different:
            lines.append(f"different: {_some([f'{name} ({how})' for name, how in self.different.items()])}")
        lines += [f"in the file only: {_some(self.unused)}"] if self.unused else []
        return "; ".join(lines)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(frozen=True)
class Choice:
    """Hold the arguments that choose parameters; construction checks them.

    Attributes
    ----------
    include, exclude : tuple of str
        Shell patterns of the model's parameters that are loaded (none: all), and of those that are not.
    rules : ImportRules
        Names of parameters in the file and in the model.
    strict : bool
        Whether a chosen parameter that cannot be loaded is an error, and without patterns also one that is in the file
        only.
    """

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    rules: ImportRules
    strict: bool

    @classmethod
    def of(cls, include: Any, exclude: Any, rename: Any, strict: bool | None) -> Choice:
        """Check the arguments of ``load_parameters``."""
        inside, outside = as_patterns("include", include), as_patterns("exclude", exclude)
        if rename is not None and not isinstance(rename, Mapping):
            raise ConfigError(
                f"rename={rename!r:.80}: expected names in the file and their names in the model, such as "
                '{"backbone.*": "encoder.*"}'
            )
        rules = ImportRules(names=tuple((str(old), str(new)) for old, new in (rename or {}).items()))
        return cls(inside, outside, rules, not (inside or outside) if strict is None else bool(strict))

    def report(self, specs: Mapping[str, tuple[tuple[int, ...], str]], file: ParameterFile) -> tuple[LoadReport, Any]:
        """Compare the model's parameters with those of ``file``; return the report and the file's name of each.

        ``specs`` has shape and element type of the model's parameters by name. Not collective.
        """
        names = list(specs)
        inside = selected(names, "include", self.include) if self.include else names
        outside = set(selected(names, "exclude", self.exclude))
        chosen = [name for name in inside if name not in outside]
        if not chosen:
            raise ConfigError("load_parameters: exclude leaves nothing of what include chooses")
        origin = self._origin(file)
        taken, missing, different = [], [], {}
        for name in chosen:
            if name not in origin:
                missing.append(name)
            elif how := _difference(specs[name], file.arrays[origin[name]]):
                different[name] = how
            else:
                taken.append(name)
        picked = set(chosen)
        left = tuple(name for name in names if name not in picked)
        unused = tuple(there for name, there in origin.items() if name not in specs)
        report = LoadReport(file.path, tuple(taken), left, tuple(missing), different, unused)
        self._check(report, names)
        return report, origin

    def _origin(self, file: ParameterFile) -> dict[str, str]:
        """Return the file's name of each parameter that it has, by its name in the model."""
        origin: dict[str, str] = {}
        for old, _ in self.rules.names:
            selected(list(file.arrays), "rename", [old], f"parameter of {file.path}")
        for name in file.arrays:
            new = short_name(self.rules.path(name))
            if new in origin:
                raise ConfigError(f"rename: {origin[new]!r} and {name!r} of {file.path} both become {new!r}")
            origin[new] = name
        return origin

    def _check(self, report: LoadReport, names: Sequence[str]) -> None:
        unexpected = () if self.include or self.exclude else report.unused
        if report.taken and not (self.strict and (report.missing or report.different or unexpected)):
            return
        problems = [f"missing {_some(report.missing)}"] if report.missing else []
        problems += [f"different {name}: {how}" for name, how in list(report.different.items())[:5]]
        problems += [f"only in the file {_some(report.unused)}"] if report.unused else []
        hint = nearest(report.unused[0], report.missing or names) if report.unused else ""
        told = "holds none of the chosen parameters" if not report.taken else "holds other parameters than the model"
        raise CheckpointError(
            f"{report.path} {told}: {'; '.join(problems)}{hint}; choose with include=[...], or map names with "
            'rename={"old.*": "new.*"}'
        )


def _difference(wanted: tuple[tuple[int, ...], str], found: tuple[tuple[int, ...], str | None]) -> str:
    """Describe how shape and type of a parameter in the file differ from the model's; "" if it can be loaded."""
    (shape, element), (there, stored) = wanted, found
    if tuple(there) != tuple(shape):
        turned = ", transposed" if tuple(there) == tuple(shape)[::-1] else ""
        return f"shape {list(there)} in the file, {list(shape)} in the model{turned}"
    return "" if loadable(stored, element) else f"{stored or 'an unknown type'} in the file, {element} in the model"


@dataclass
class _Renamed:
    """Read arrays of a model from a file in which they have other names."""

    file: ParameterFile
    origin: Mapping[str, str]
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[LocalArray]) -> None:
        """Read values into the pieces of ``requests``. Collective."""
        self.file.read([replace(request, path=self.origin[short_name(request.path)]) for request in requests])


def load_chosen(engine: Engine, path: Any, choice: Choice) -> LoadReport:
    """Load the chosen parameters, or change nothing and raise on every rank; return what was loaded.

    Collective over the world. Optimizer state and step numbers stay as they are.
    """
    world = engine.grid.world
    agree_equal(world, lambda: {"the arguments of load_parameters": choice}, "load parameters")
    arrays = parameter_arrays(engine)
    specs = {array.spec.name: (array.spec.shape, array.dtype.name) for array in arrays}
    with open_parameters(path, world) as file:
        found: list[tuple[LoadReport, Any]] = []
        with all_ranks(world, "load parameters"):
            found.append(choice.report(specs, file))
        report, origin = found[0]
        taken = set(report.taken)
        own = [array for array in arrays if array.spec.name in taken]
        table = {array.path: (array.shape, array.dtype) for array in own}
        fill(engine, _Renamed(file, origin, table, {}), own)
    engine.store.publish()
    engine.begin_average()
    return report
