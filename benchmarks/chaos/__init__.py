"""The table of faults of docs/reliability.md: each row a function that runs alone, `make chaos ROWS=3,7`."""
