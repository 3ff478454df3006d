"""Run a training: configuration files, the training loop, callbacks, checkpoints and resume, early stops, records."""
