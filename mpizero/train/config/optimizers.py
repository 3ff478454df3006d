"""Define the table ``[optimizer]`` of a configuration, and make the optimizer that it describes.

The table has the settings that the optimizer's own class declares, and those of the learning rate schedule. The class
of an optimizer is imported when its name is first used, because most runs use only one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar

from mpizero import optim
from mpizero._util.checks import number, positive, whole
from mpizero._util.settings import ConfigSection, allowed, like, many, one_of, optional, setting

#: The optimizers with a learning rate, and the full-batch methods: names in a file, and classes of
#: :mod:`mpizero.optim`.
STEPPING = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "lion": "Lion",
    "lamb": "LAMB",
    "muon": "Muon",
    "soap": "SOAP",
}
VECTOR_METHODS = {"l-bfgs": "LBFGS", "cg": "NonlinearCG", "newton-cg": "NewtonCG"}
OPTIMIZERS = STEPPING | VECTOR_METHODS
#: The default learning rates of optimizers for which the default of :class:`RateSection` is unusual.
_RATES = {"sgd": 0.01, "lion": 1e-4, "muon": 0.02, "soap": 3e-3}
#: Settings of ``[train]`` that must have these values with full-batch methods, which need the exact loss and gradient
#: in host memory.
_CLASHES: Mapping[str, Any] = {
    "clip": None,
    "ema": None,
    "gradient_compression": None,
    "wire": None,
    "mixed_precision": None,
    "device": "cpu",
}
_BOUNDS = "[low, high] for all parameters, or a table of such pairs by name; inf and -inf are no bounds"


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(ConfigSection):
    """Serve as base class of the sections ``[optimizer]``; :func:`optimizer_section` makes one for each optimizer."""

    table = "optimizer"
    #: The optimizer's class.
    kind: ClassVar[Any]

    name: str = setting("adamw", one_of(*OPTIMIZERS), resume="never")

    def check_combination(self) -> None:
        """Raise SettingError if settings contradict each other for this optimizer."""
        self.kind.check_combination(self)  # reads only the optimizer's own settings, which are fields of self, too

    def declared_settings(self) -> dict[str, Any]:
        """Return the values of the settings that the optimizer's class declares, by name, without ``lr``."""
        known = {item.name for item in fields(self)} - {"lr"}
        return {item.name: getattr(self, item.name) for item in fields(self.kind) if item.name in known}

    def optimizer(self, steps: int) -> Any:
        """Return the optimizer for a training of ``steps`` steps. Not collective."""
        return self.kind(**self.declared_settings())


@dataclass(frozen=True, kw_only=True)
class RateSection(OptimizerSection):
    """Hold the settings of an optimizer with a learning rate, and of the rate's schedule."""

    lr: float = setting(3e-4, positive)
    schedule: str = setting("constant", one_of("constant", "linear", "cosine"))
    schedule_steps: int | None = setting(None, optional(whole(1)))
    warmup: int = setting(0, whole(0))
    end: float = setting(0.0, number())

    def check_combination(self) -> None:
        """Raise SettingError if ``end`` or ``schedule_steps`` is set for a constant rate, or ``end`` exceeds ``lr``."""
        super().check_combination()
        for name in ("end", "schedule_steps"):
            if getattr(self, name) and self.schedule == "constant":
                raise self.reject(name, 'belongs to the schedules "linear" and "cosine"; a constant rate has no end')
        if self.end > self.lr:
            raise self.reject("end", f"must be at most optimizer.lr = {self.lr}")

    def rate(self, steps: int) -> Any:
        """Return the learning rate schedule; it ends at the step ``schedule_steps``, or ``steps`` if that is None."""
        if self.schedule == "constant":
            return optim.constant(self.lr, warmup=self.warmup)
        schedule = {"linear": optim.linear, "cosine": optim.cosine}[self.schedule]
        return schedule(self.lr, steps=self.schedule_steps or steps, warmup=self.warmup, end=self.end)

    def optimizer(self, steps: int) -> Any:
        """Return the optimizer with its schedule, for a training of ``steps`` steps. Not collective."""
        return self.kind(lr=self.rate(steps), **self.declared_settings())


@dataclass(frozen=True, kw_only=True)
class VectorMethodSection(OptimizerSection):
    """Hold the settings of a full-batch method."""

    def check_run(self, train: ConfigSection, model: ConfigSection) -> None:
        """Raise SettingError for settings of ``[train]`` and ``[model]`` that a full-batch method does not allow."""
        method = f'optimizer.name = "{self.name}"'
        for key, without in _CLASHES.items():
            if getattr(train, key) != without:
                raise train.reject(
                    key, f"must be left out with {method}, which needs the exact loss and gradient, on the host"
                )
        if getattr(model, "dropout", 0.0):
            raise model.reject("dropout", f"must be 0 with {method}, which needs the same function in every step")


@cache
def optimizer_section(name: str) -> type[OptimizerSection]:
    """Return the class of the section ``[optimizer]`` for the optimizer ``name``, such as "adamw". Not collective."""
    kind = getattr(optim, OPTIMIZERS[name])
    settings: dict[str, Any] = {item.name: like(kind, item.name) for item in fields(kind) if "check" in item.metadata}
    settings.pop("exact", None)  # of NewtonCG, only for mpizero.minimize
    settings["name"] = setting(name, one_of(*OPTIMIZERS), resume="never")
    if name in _RATES:
        settings["lr"] = setting(_RATES[name], positive)
    if name == "l-bfgs":
        settings["bounds"] = setting(None, optional(_bounds), resume="never")
    return make_dataclass(
        f"{kind.__name__}Section",
        [(key, Any, made) for key, made in settings.items()],
        bases=(RateSection if name in STEPPING else VectorMethodSection,),
        namespace={"kind": kind},
        frozen=True,
        kw_only=True,
    )


def _limit(value: Any) -> float | None:
    if value is None:  # no bound, in a configuration from a checkpoint
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("must be a number")
    return None if math.isinf(value) else float(value)


def _bounds(value: Any) -> dict[str, list[float | None]]:
    """Check ``optimizer.bounds``; return pairs of bounds by patterns of parameter names; None means no bound."""
    bounds = {}
    for name, pair in (value if isinstance(value, Mapping) else {"*": value}).items():
        where = f"{name}: " if isinstance(value, Mapping) else ""
        try:
            low, high = many(_limit, count=2)(pair)
        except ValueError as error:
            raise ValueError(f"must be {_BOUNDS}; {where}{allowed(error)}") from None
        if None not in (low, high) and low > high:
            raise ValueError(f"must be {_BOUNDS}; {where}low is above high")
        bounds[str(name)] = [low, high]
    return bounds
