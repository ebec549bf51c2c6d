"""Saving, committing and restoring a run's state."""
