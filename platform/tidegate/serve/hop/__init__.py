"""A gateway's own connection to each replica: requests out, pictures back. Why it is not Serve's handle:
docs/decisions/0007-own-hop-to-replicas.md."""
