"""`python -m ppserve`, and the command `ppserve`."""

import sys

from ppserve.supported import end_unless_supported


def main() -> None:
    """Run a command where ppserve can run, else say why it cannot."""
    end_unless_supported()
    try:
        from ppserve.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
