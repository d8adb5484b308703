"""A pipeline in one process, for programs and notebooks: stages are threads. Never a socket, never a protocol."""
