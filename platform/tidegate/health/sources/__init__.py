"""One file for each kind of source; all give the same `Reading`."""
