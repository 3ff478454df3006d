"""Run the forward and backward passes of a step."""
