"""vLLM's gRPC protocol, which routers speak to engines. Never a check that another protocol needs."""
