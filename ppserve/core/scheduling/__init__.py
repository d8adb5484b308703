"""Who computes next, and where its keys and values lie. Never a clock or I/O: both come in as arguments."""
