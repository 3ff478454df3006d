"""Define the section ``[data]``: samples in files, or made by a function of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import fraction
from mpizero.train.config.data_checks import arrays, patterns, stored
from mpizero.train.config.make_settings import MakeSettings
from mpizero.train.config.setting_checks import ConfigSection, optional, rejected, setting

#: Settings that name the samples.
KINDS = ("text", "arrays", "hdf5", "zarr", "netcdf")


@dataclass(frozen=True, kw_only=True)
class DataSection(ConfigSection):
    """Hold the origin of the samples: exactly one of :data:`KINDS`.

    Relative paths start at the working directory. ``validation`` is the fraction of samples held back for validation.
    """

    text: tuple[str, ...] | None = setting(None, optional(patterns))
    arrays: Any = setting(None, optional(arrays))
    hdf5: Any = setting(None, optional(stored))
    zarr: Any = setting(None, optional(stored))
    netcdf: Any = setting(None, optional(stored))
    validation: float = setting(0.05, fraction)

    @property
    def kind(self) -> str:
        """The setting that is given, one of :data:`KINDS`."""
        return next(key for key in KINDS if getattr(self, key) is not None)

    def check_combination(self) -> None:
        """Raise an error if not exactly one of :data:`KINDS` is given."""
        given = [key for key in KINDS if getattr(self, key) is not None]
        if len(given) != 1:
            what = " and ".join(f"data.{key}" for key in given) if given else "none"
            example = 'text = ["corpus/*.txt"], text = "stdlib", arrays = {x = "x.npy", y = "y.npy"}, arrays = "digits"'
            raise rejected("data", what, f"must have exactly one of {', '.join(KINDS)} and make, for example {example}")


@dataclass(frozen=True, kw_only=True)
class MadeDataSection(MakeSettings):
    """Hold the function that makes the samples, and its arguments.

    ``validation`` is the fraction of samples held back for validation. None means 0.05, or nothing if the function
    makes the samples for validation too.
    """

    validation: float | None = setting(None, optional(fraction))

    #: The setting that is given, as in :class:`DataSection`.
    kind = "make"

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file."""
        return "data"
