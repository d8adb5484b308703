"""`python -m ppserve`."""

from ppserve.cli import main

main()
