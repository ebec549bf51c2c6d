"""One training run's life on Ray Train."""
