"""Shared by all tests: what hypothesis may assume of a machine that is shared with others."""

from hypothesis import settings

# No deadline: a slow moment of a shared machine is not a defect.
settings.register_profile("ppserve", deadline=None)
settings.load_profile("ppserve")
