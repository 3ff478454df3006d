"""Store parameters: shards, shared copies, publication after an update."""
