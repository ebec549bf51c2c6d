"""The gateway, its routing, the engine and the providers behind the spillway."""
