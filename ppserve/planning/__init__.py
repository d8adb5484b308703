"""Predicts what would run where, and how fast, without loading weights. Never a running server."""
