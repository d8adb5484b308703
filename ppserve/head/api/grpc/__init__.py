"""The gRPC service: messages, statuses, the listening socket. Never a check that another protocol needs."""
