"""Start jobs, see them end, let them take turns, and tell what they found: what all scripts that run others share."""
