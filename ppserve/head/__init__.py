"""The process that holds all state of requests. Never torch: its event loop must not wait for it."""
