"""Run one training on several parallel layouts; name the first number that differs, its place and cause."""
