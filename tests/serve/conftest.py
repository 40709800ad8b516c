"""Servers for the tests of protocols."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.scripted import Scripted, app_of, serving


@pytest.fixture
def answers() -> Scripted:
    """Answers that the test writes."""
    return Scripted()


@pytest.fixture
def url(answers: Scripted) -> Iterator[str]:
    """The address of a server that gives these answers."""
    with serving(app_of(answers)) as address:
        yield address
