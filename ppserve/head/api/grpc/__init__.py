"""gRPC: calls in, messages and statuses out. Never a check that another protocol needs."""
