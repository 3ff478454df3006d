"""Send the samples of a global batch to the ranks that compute them, and agree on losses and weights."""
