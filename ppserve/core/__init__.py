"""Policy without I/O: no torch, no grpc, no clock, no sockets. Time comes in as an argument, in seconds."""
