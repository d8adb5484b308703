"""The tour's one exception, and the short way to raise it."""

from ppserve import PpserveError


class TourError(PpserveError):
    """What the tour promised to show is not so, or cannot be shown here."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TourError(otherwise)
