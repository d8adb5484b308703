"""`python -m ppserve`."""

from ppserve.cli.main import main

main()
