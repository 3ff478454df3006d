"""Run the forward and backward passes of a training step, and the forward passes of evaluation and prediction."""
