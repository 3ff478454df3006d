"""Look at training from outside: plan, bench, verify, check models, report; training itself imports nothing of it."""
