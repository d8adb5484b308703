"""The process that holds all state of requests. Never imports torch: its event loop must not wait for it."""
