"""Find the velocities below a survey: ``mpizero.minimize``, from low frequencies to high ones, with checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mpizero as mz
from mpizero import checkpoint
from mpizero._util.checks import require, whole
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ConfigError

from .misfit import Misfit
from .survey import FASTEST, SLOWEST, WATER, Survey, start_velocity, true_velocity

#: Checkpoints that stay in the folder; the older ones are removed.
KEEP = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold all that determines the result.

    Attributes
    ----------
    survey : Survey
        Grid, sources and receivers.
    peaks : tuple of float
        Frequencies in Hz; each is that of the wavelet of one stage.
    iterations : int
        Of each stage.
    """

    survey: Survey
    peaks: tuple[float, ...]
    iterations: int

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if there is no iteration to make."""
        require("iterations", self.iterations, whole(1))

    def saved(self) -> dict[str, Any]:
        """Return the settings by name, as values for JSON."""
        return {**asdict(self.survey), "peaks": list(self.peaks), "iterations": self.iterations}


@dataclass(frozen=True)
class Iteration:
    """Hold what one iteration has reached: the stage's number and frequency, and misfit and error of the model."""

    stage: int
    peak: float
    misfit: float
    error: float


@dataclass(frozen=True)
class Reached:
    """Hold velocities with their misfit at the last frequency, their error, and the gradient of that misfit."""

    velocity: np.ndarray
    misfit: float
    error: float
    gradient: np.ndarray


@dataclass(frozen=True)
class Found:
    """Hold what an inversion has found: where it has begun and ended, the hash of its end, and all iterations."""

    start: Reached
    end: Reached
    sha256: str
    iterations: list[Iteration]


class Shots(mz.data.Source):
    """Provide the shots of a survey, as recorded above the true velocities; each rank computes those that it reads."""

    def __init__(self, misfit: Misfit, velocity: np.ndarray, peak: float) -> None:
        self._misfit, self._velocity, self._peak = misfit, velocity, peak

    def __len__(self) -> int:
        return self._misfit.survey.shots

    def read(self, indices: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return sources and wavelets by name, and what was recorded: (shots, steps, receivers)."""
        survey, dtype = self._misfit.survey, self._velocity.dtype
        sources = survey.sources[indices]
        wavelets = np.tile(survey.wavelet(self._peak).astype(dtype), (len(indices), 1))
        recorded = np.empty((len(indices), survey.steps, survey.receivers), dtype)
        for shot, (source, wavelet) in enumerate(zip(sources, wavelets, strict=True)):
            recorded[shot] = self._misfit.records(self._velocity, source, wavelet)
        return {"source": sources, "wavelet": wavelets}, recorded

    def describe(self) -> dict[str, Any]:
        """Return the survey and the frequency."""
        return {"survey": self._misfit.survey, "peak": self._peak}


class Inversion:
    """Run an inversion; its methods are collective over the ranks of ``mesh``.

    Parameters
    ----------
    mesh : Mesh
        The ranks.
    config : Config
        One shot a grain.
    settings : Settings
        All that determines the result.
    folder : Path
        Where checkpoints are.
    every : int
        Iterations between two checkpoints.
    report : callable
        Called on all ranks with a line of text after every iteration and every stage.
    """

    def __init__(
        self,
        mesh: mz.Mesh,
        config: mz.Config,
        settings: Settings,
        folder: Path,
        every: int,
        report: Callable[[str], object],
    ) -> None:
        self._mesh, self._config, self._settings, self._folder = mesh, config, settings, folder
        self._every, self._report = require("every", every, whole(1)), report
        survey = settings.survey
        self._misfit = Misfit(survey)
        self._truth, self._start = (make(survey).astype(np.float32) for make in (true_velocity, start_velocity))
        self._done: list[Iteration] = []
        self._began = time.monotonic()

    def run(self, *, resume: bool) -> Found:
        """Go through all stages, from the start or from the newest checkpoint, and return what was found."""
        path = self._checkpoint(resume=resume)
        first = self._done[-1].stage if path else 0
        function = self._function(self._start)
        with mz.distribute(function, None, "zero1", mesh=self._mesh, config=self._config) as model:
            for stage in range(first, len(self._settings.peaks)):
                peak = self._settings.peaks[stage]
                ended = mz.minimize(
                    model,
                    Shots(self._misfit, self._truth, peak),
                    bounds={"velocity": self._bounds()},
                    callback=partial(self._look, stage),
                    options={"maxiter": self._settings.iterations, "gtol": 0.0},
                    resume=path if stage == first else None,
                )
                self._report(f"{peak:g} Hz: {ended.message}")
            velocity, sha256 = model.named_parameters()["velocity"], model.parameters_sha256()
        return Found(self._reached(self._start), self._reached(velocity), sha256, self._done)

    def _function(self, velocity: np.ndarray) -> mz.FunctionModel:
        return mz.FunctionModel({"velocity": velocity}, self._misfit.loss_and_grad, in_place=True)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and largest velocities: that of water is known, and time steps are too long for others."""
        lower, upper = np.full_like(self._start, SLOWEST), np.full_like(self._start, FASTEST)
        lower[: self._settings.survey.water] = upper[: self._settings.survey.water] = WATER
        return lower, upper

    def _error(self, velocity: np.ndarray) -> float:
        """Return the root of the mean squared error of the velocities below the water, in km/s."""
        apart = (velocity - self._truth)[self._settings.survey.water :]
        return float(np.sqrt(np.mean(apart**2, dtype=np.float64)))

    def _look(self, stage: int, found: mz.sharding.MinimizeResult) -> None:
        """Report an iteration, and save a checkpoint where one is due; the callback of ``minimize``."""
        peak, most = self._settings.peaks[stage], self._settings.iterations
        error = self._error(found.model.named_parameters()["velocity"])
        self._done.append(Iteration(stage, peak, found.fun, error))
        self._report(
            f"{peak:g} Hz, iteration {found.nit} of {most}: misfit {found.fun:.4e}, gradient {found.norm:.1e}, "
            f"model error {error:.4f} km/s, {found.nfev} evaluations, {time.monotonic() - self._began:.0f} s"
        )
        if found.nit % self._every == 0 or found.nit == most:
            attributes = {"settings": self._settings.saved(), "iterations": [asdict(one) for one in self._done]}
            path = checkpoint.step_folder(self._folder, len(self._done))
            found.model.save_model(path, attributes={"inversion": attributes})
            checkpoint.prune(self._folder, KEEP, self._mesh.communicator)

    def _checkpoint(self, *, resume: bool) -> str | None:
        """Return the newest checkpoint and take its iterations, to resume; None to begin."""
        comm = self._mesh.communicator
        path = checkpoint.latest(self._folder, comm)
        if not resume and path:
            raise ConfigError(f"{path} is of an earlier run: go on from it with --resume, or give another --folder")
        if not resume:
            with all_ranks(comm):
                if comm.rank == 0:
                    _make(self._folder)
            return None
        if path is None:
            raise ConfigError(
                f"--resume: {self._folder} holds no checkpoint; give the --folder of a run that has saved one"
            )
        with checkpoint.open_checkpoint(path, comm) as reader, all_ranks(comm):
            saved = reader.attributes.get("inversion")
            if saved is None:
                raise ConfigError(f"{path} is not of this program; give another --folder")
            for name, value in self._settings.saved().items():
                if (known := saved["settings"].get(name)) != value:
                    raise ConfigError(
                        f"{path} was made with {name}={known}, this run has {value}: give the same options, or another "
                        "--folder"
                    )
            self._done = [Iteration(**one) for one in saved["iterations"]]
        return path

    def _reached(self, velocity: np.ndarray) -> Reached:
        """Evaluate velocities at the last frequency."""
        comm, shots = self._mesh.communicator, Shots(self._misfit, self._truth, self._settings.peaks[-1])
        with all_ranks(comm):
            x, y = shots.samples(np.array_split(np.arange(len(shots)), comm.size)[comm.rank])
        function = self._function(velocity)
        with mz.distribute(function, None, "ddp", mesh=self._mesh, config=self._config) as model:
            found = model.compute_gradients(x, y)
            return Reached(velocity, found.loss, self._error(velocity), found.values.reshape(velocity.shape).copy())


def _make(folder: Path) -> None:
    """Make the folder now, not at the first checkpoint: what is wrong with it is told at once. Not collective."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror}: give one that can be made") from error
