"""The routes of all protocols."""

from __future__ import annotations

from fastapi import APIRouter

from mlxrunner.serve.answering.answers import Answers
from mlxrunner.serve.apis import models
from mlxrunner.serve.apis.anthropic import routes as anthropic
from mlxrunner.serve.apis.ollama import routes as ollama
from mlxrunner.serve.apis.openai import chat_routes, completions, response_routes


def routers(answers: Answers) -> list[APIRouter]:
    """Return the routers of all protocols."""
    return [
        anthropic.router(answers),
        chat_routes.router(answers),
        response_routes.router(answers),
        completions.router(answers),
        ollama.router(answers),
        models.router(answers),
    ]
