"""Log a run with Weights & Biases, offline: mpiexec -n 2 python wandb_logger.py.

Later, where there is a network: wandb sync run/wandb/offline-run-*
"""

import numpy as np

import mpizero as mz


class WeightsAndBiases(mz.Callback):
    """Writes figures into files in the run's folder, on rank 0; nothing is sent, the other ranks wait for it."""

    def __init__(self, **settings):
        """Keep the settings to log as configuration of the run."""
        self.settings, self.name, self.run = settings, None, None

    def on_step(self, trainer, report):
        """Log the figures of a step."""
        if trainer.rank == 0:
            if self.run is None:
                import wandb  # only where it is used

                config = self.settings | {"ranks": trainer.world_size}
                self.run = wandb.init(
                    project="mpizero", mode="offline", dir=str(trainer.run), config=config, id=self.name, resume="allow"
                )
                self.name = self.run.id
            self._log(trainer, trainer.figures)

    def on_validation(self, trainer, figures):
        """Log the figures of a validation."""
        if trainer.rank == 0:
            self._log(trainer, figures)

    def on_end(self, trainer, result):
        """Close the files; a run that was interrupted goes on under its name."""
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _log(self, trainer, figures):
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self.run.log(numbers, step=trainer.step)

    def state_dict(self):
        """Return the name of the run."""
        return {"name": self.name}

    def load_state_dict(self, state):
        """Take the name of the run."""
        self.name = state["name"]


rng = np.random.default_rng(0)
x = rng.normal(size=(400, 4)).astype(np.float32)
source = mz.data.ArraySource(x, (x.sum(axis=1, keepdims=True) ** 2).astype(np.float32))
net = mz.nn.MLP(4, (32,), 1, task="regression")

with mz.Trainer(
    net,
    source,
    optimizer=mz.AdamW(1e-2),
    steps=60,
    global_batch=32,
    validation=0.1,
    validate_every=20,
    callbacks=[WeightsAndBiases(lr=1e-2, hidden=32)],
) as trainer:
    result = trainer.resume()
    if trainer.rank == 0:
        print(f"loss {result.loss:.4f}, {result.parameters_sha256[:16]}")
