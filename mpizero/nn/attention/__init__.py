"""Compute causal attention in one process: by one kernel, or by batched products."""
