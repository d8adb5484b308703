"""What every protocol does with a request: check it, queue it, stream its tokens, end it.

In `core`'s values only; one folder for each protocol. Never a protocol's message, never a scheduling decision.
"""
