"""Log a run with MLflow, without a server: mpiexec -n 2 python mlflow_logger.py.

Then look at it: mlflow ui --backend-store-uri sqlite:///run/mlflow.db
"""

import numpy as np

import mpizero as mz


class MLflow(mz.Callback):
    """Writes figures into a database in the run's folder, on rank 0; the other ranks wait for it."""

    def __init__(self, **settings):
        """Keep the settings to log as parameters of the run."""
        self.settings, self.run, self.mlflow = settings, None, None

    def _start(self, trainer):
        import mlflow  # only where it is used

        self.mlflow = mlflow
        mlflow.set_tracking_uri(f"sqlite:///{trainer.run}/mlflow.db")
        known = self.run is not None
        self.run = mlflow.start_run(run_id=self.run).info.run_id
        if not known:
            mlflow.log_params(self.settings | {"ranks": trainer.world_size})

    def on_step(self, trainer, report):
        """Log the figures of a step."""
        if trainer.rank == 0:
            if self.mlflow is None:
                self._start(trainer)
            self._log(trainer, trainer.figures)

    def on_validation(self, trainer, figures):
        """Log the figures of a validation."""
        if trainer.rank == 0:
            self._log(trainer, figures)

    def on_end(self, trainer, result):
        """End MLflow's run; one that was only interrupted goes on with the next resume."""
        if self.mlflow is not None:
            self.mlflow.end_run("KILLED" if result is None else "FINISHED")
            self.mlflow = None

    def _log(self, trainer, figures):
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self.mlflow.log_metrics(numbers, step=trainer.step)

    def state_dict(self):
        """Return MLflow's name of the run, under which a resumed run goes on."""
        return {"run": self.run}

    def load_state_dict(self, state):
        """Take MLflow's name of the run."""
        self.run = state["run"]


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
    callbacks=[MLflow(lr=1e-2, hidden=32)],
) as trainer:
    result = trainer.resume()
    if trainer.rank == 0:
        print(f"loss {result.loss:.4f}, {result.parameters_sha256[:16]}")
