"""Attributes every nanosecond of every stage to computing, a cause of waiting, or idleness. Never a clock."""
