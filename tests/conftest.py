"""Shared by all tests: what they may assume of the machine and of whoever started them."""

import signal

from hypothesis import settings

# No deadline: a slow moment of a shared machine is not a defect.
settings.register_profile("ppserve", deadline=None)
settings.load_profile("ppserve")

# A shell that runs tests in the background has them ignore Ctrl-C, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
