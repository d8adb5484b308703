"""What every protocol does with a request: check it, queue it, stream its tokens, end it.

It uses only values of `core`, and each protocol has a folder. Never a protocol's message, never a scheduling
decision.
"""
