"""Where every nanosecond of every stage went, and why. Never a clock: stamps come in as arguments."""
