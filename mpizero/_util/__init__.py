"""Hold what every part of the library uses: trees of arrays, fingerprints, checks of arguments, names, texts."""
