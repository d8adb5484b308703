"""The process that holds the state of all requests. Never imports torch, which would delay its event loop."""
