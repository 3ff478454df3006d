"""Plan, measure, verify and report trainings, and check models; the training code imports nothing from this package."""
