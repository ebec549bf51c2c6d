"""Prepared shards: layout, order, loader."""
