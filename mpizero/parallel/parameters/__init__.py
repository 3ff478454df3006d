"""Store parameters as shards or as copies that a node shares, and send updated parameters to all copies."""
