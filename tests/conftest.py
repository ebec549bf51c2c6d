"""Its place puts `tests/` on the import path: `from waiting import wait_until`."""
