"""Stand-ins that we ship: a fake NVML library, a stand-in provider, a fake clock, a local cluster."""
