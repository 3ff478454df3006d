"""Run an optimizer on the shards of a rank."""
