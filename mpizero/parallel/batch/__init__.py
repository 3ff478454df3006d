"""The global batch: bring samples to the ranks that compute them, and agree on the scalars of a step."""
