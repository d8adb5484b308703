"""vLLM's gRPC protocol, which routers speak. No check that another protocol needs is here."""
