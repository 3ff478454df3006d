"""Run an optimizer on the shards of the parameters that a rank owns."""
