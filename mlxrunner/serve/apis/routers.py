"""The routes of all protocols."""

from __future__ import annotations

from fastapi import APIRouter

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis.anthropic.routes import router as anthropic_router


def routers(answers: Answers) -> list[APIRouter]:
    """Return the routers of all protocols."""
    return [anthropic_router(answers)]
