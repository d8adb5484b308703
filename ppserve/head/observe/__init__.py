"""Metrics, trace and live page of the engine. Never a decision: nothing here changes what is computed."""
