"""Capacity outside, one adapter a file."""
