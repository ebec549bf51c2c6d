"""`policy.yaml` as frozen models: load, check, explain."""
