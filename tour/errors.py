"""The tour's one exception, and the short way to raise it."""

from ppserve import PpserveError


class TourError(PpserveError):
    """The tour cannot run here, or what it was to show is not true."""


def require(holds: bool, otherwise: str) -> None:
    """Raise TourError with the text `otherwise` unless `holds`."""
    if not holds:
        raise TourError(otherwise)
