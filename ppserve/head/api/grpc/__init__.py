"""gRPC: calls in, messages and statuses out, the listening socket. Never a check that another protocol needs."""
