"""Metrics, trace and live page of the engine. Never a decision that changes what is computed."""
