"""tidegate: one Ray cluster that trains a diffusion transformer and serves it."""

__version__ = "0.1.0"
