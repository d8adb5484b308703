"""Who computes next, and where its keys and values lie. Never a clock or I/O: time and results come in as arguments."""
