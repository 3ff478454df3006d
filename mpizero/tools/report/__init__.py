"""Show the records of runs as an HTML page, and live on a terminal."""
