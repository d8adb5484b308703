"""A pipeline in one process, for programs and notebooks: stages are threads.

Never opens a socket, never speaks a protocol.
"""
