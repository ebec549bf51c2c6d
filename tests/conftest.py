"""Its place puts `tests/` on the import path: `from waiting import wait_until`."""

from hypothesis import settings

# An example's time says how busy the machine is, not whether the property holds.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")
