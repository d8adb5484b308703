"""Values and pure arithmetic that every room shares. Never a clock, a socket, a thread or a tensor."""
