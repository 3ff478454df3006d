"""From one configuration file to a trained, checkpointed, resumable run."""
