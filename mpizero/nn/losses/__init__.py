"""Compute losses as a sum and a weight, so that the sums and weights of the parts of a batch can be added."""
