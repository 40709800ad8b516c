"""Assertions that say in one line what they expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has(found: Any, **wanted: Any) -> None:
    """Assert that the items, or the attributes, with these names have these values."""
    of = found.__getitem__ if isinstance(found, Mapping) else found.__getattribute__
    assert {name: of(name) for name in wanted} == wanted
