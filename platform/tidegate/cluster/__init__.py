"""Start and stop Ray on this machine with our settings."""
