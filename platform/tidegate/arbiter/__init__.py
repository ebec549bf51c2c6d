"""Who holds which GPU: view, decide, record, act."""
