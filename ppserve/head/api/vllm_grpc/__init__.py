"""vLLM's gRPC protocol, which routers speak. Never a check that another protocol needs."""
