"""The pipeline that tests of the library share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppserve import Pipeline
from tests.library.mixed import tiny


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Pipeline]:
    with tiny(2) as pipeline:
        yield pipeline
