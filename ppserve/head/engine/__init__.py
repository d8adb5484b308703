"""One pipeline and the thread that keeps it full. Never a client's protocol, never a metric's name."""
