"""gRPC: calls come in, messages and statuses go out. No check that another protocol needs is here."""
