"""Collect the gradients of a step, and sum and average them over the ranks of the data group."""
