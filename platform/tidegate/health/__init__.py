"""Readings, rules and verdicts of one node."""
