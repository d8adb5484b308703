"""Decides which tokens are computed next, and in which KV blocks. Never a clock or I/O: both are arguments."""
