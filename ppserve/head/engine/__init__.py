"""One pipeline, and the thread that keeps it full. Never a client's protocol or a metric's name."""
