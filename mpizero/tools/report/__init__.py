"""Show what runs have recorded: as a page of HTML, and live on a terminal."""
