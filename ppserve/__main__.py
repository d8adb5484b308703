"""`python -m ppserve`, and the command `ppserve`."""

from ppserve.process.interrupts import end_at_interrupt

end_at_interrupt()  # before anything is imported that takes time

from ppserve.supported import end_unless_supported


def main() -> None:
    """Run a command where ppserve can run, else say why it cannot."""
    end_unless_supported()
    from ppserve.process.lifetime import die_with_launcher

    die_with_launcher()
    from ppserve.cli.main import main as run

    try:
        run()
    finally:
        end_at_interrupt()


if __name__ == "__main__":
    main()
