"""Attributes every nanosecond of every stage to computing, to a cause of waiting, or to idleness. Never a clock."""
