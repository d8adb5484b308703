"""A stage's life: its link to the head, its steps, its transports. Never a request or gRPC."""
