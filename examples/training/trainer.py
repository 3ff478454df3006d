"""Train with mz.Trainer, and go on where a job was stopped: mpiexec -n 4 python trainer.py [--resume]."""

import sys

import numpy as np

import mpizero as mz


def loss_and_grad(parameters, batch):
    """Classify by a logistic regression: the sum of the losses, its gradient, the number of samples."""
    x, y = batch
    score = x @ parameters["weight"] + parameters["offset"]
    error = 1 / (1 + np.exp(-score)) - y
    loss = np.logaddexp(0, score) - y * score
    return float(loss.sum()), {"weight": x.T @ error, "offset": error.sum(keepdims=True)}, float(len(x))


def predict(parameters, x):
    """Return the score of each sample."""
    return x @ parameters["weight"] + parameters["offset"]


def wrong(model, batch):
    """Count the samples on the wrong side: a sum over the samples, and their number."""
    x, y = batch
    return float(((model.predict(x) > 0) != y).sum()), len(y)


class Smoothed(mz.Callback):
    """Ends the run when a running mean of the loss is small; the mean outlives interruptions."""

    def __init__(self, goal):
        """Keep the goal."""
        self.goal, self.mean = goal, None

    def on_step(self, trainer, report):
        """Update the mean, which is the same on every rank."""
        self.mean = report.loss if self.mean is None else 0.9 * self.mean + 0.1 * report.loss
        if self.mean < self.goal:
            trainer.stop(f"the mean loss is below {self.goal}")

    def state_dict(self):
        """Return what a checkpoint keeps."""
        return {"mean": self.mean}

    def load_state_dict(self, state):
        """Take what a checkpoint has kept."""
        self.mean = state["mean"]


rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 8))
y = (x @ rng.normal(size=8) + 0.3 * rng.normal(size=2000) > 0).astype(float)
model = mz.FunctionModel({"weight": np.zeros(8), "offset": np.zeros(1)}, loss_and_grad, predict=predict)

with mz.Trainer(
    model,
    mz.data.ArraySource(x, y),
    optimizer=mz.AdamW(1e-2),
    steps=400,
    global_batch=64,
    strategy="zero2",
    validation=0.2,
    validate_every=20,
    metrics={"wrong": wrong},
    best="wrong",
    patience=6,
    callbacks=[Smoothed(0.15)],
    every=50,
    run="run",
) as trainer:
    result = trainer.resume() if "--resume" in sys.argv else trainer.fit()
    if trainer.rank == 0:
        print(
            f"{result.steps} steps, best {result.best['value']:.4f}, {result.parameters_sha256[:16]}; {result.stopped}"
        )
