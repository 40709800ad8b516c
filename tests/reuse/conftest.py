"""The oracle suite runs in small steps."""

from __future__ import annotations

from support import reused

small_steps = reused.small_steps
