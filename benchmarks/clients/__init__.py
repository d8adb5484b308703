"""Clients that people already have, unmodified, against servers of this checkout."""
