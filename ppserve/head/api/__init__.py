"""What every protocol does alike with a caller's request: check it, queue it, stream its tokens, end it.

In values of `core` only; one folder for each protocol. Never a message of a protocol, never a scheduling decision.
"""
