"""Store parameters as shards or shared copies, and publish them after an update."""
