"""Define context parallelism: layers compute on sequences whose positions are divided among ranks."""
