"""`tidegate demo`: the whole job once, on one machine.

It only drives. The cluster, the arbiter, the gateways and the run are what any user has; what the demo does to them a
user can do too: `ray start`, `tidegate up`, `serve deploy`, `ray job submit`, HTTP, signals, and editing state files.
"""
