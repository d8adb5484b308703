"""Predicts what would run where without loading weights. Never a running server."""
