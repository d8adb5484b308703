"""Metrics, trace and page of the engine. Never a decision that changes what is computed."""
