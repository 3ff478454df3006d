"""Parts of the benchmarks that let several programs take turns on one machine."""
