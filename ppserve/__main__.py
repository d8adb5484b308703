"""`python -m ppserve`."""

import sys

try:
    from ppserve.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)

main()
