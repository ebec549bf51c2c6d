"""Metric names, goodput accounting and the timeline."""
