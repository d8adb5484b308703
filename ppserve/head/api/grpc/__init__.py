"""The gRPC service: messages in and out, statuses, the listening socket. Never a check that another protocol needs."""
