"""`mlxrunner chat`: talk with a model."""

from __future__ import annotations

import sys
from typing import Any

import click

from mlxrunner.cli.options import LOADING, load, model_options, overflow_options, sampling_options, take
from mlxrunner.cli.recording import recording, recording_options


@click.command()
@model_options
@click.option("--system", metavar="TEXT", help="The system prompt.")
@sampling_options
@overflow_options("shift")
@recording_options
def chat(model: str, system: str | None, **options: Any) -> None:
    """Talk with a model. Each turn evaluates only its own tokens.

    In a terminal: line editing, /help for the commands, Ctrl-C stops an answer, Ctrl-D leaves. Otherwise each line of standard
    input is a turn, and stdout gets the answers.
    """
    from mlxrunner.chat.conversation import Conversation
    from mlxrunner.chat.repl import Repl, pipe_reader, terminal_reader
    from mlxrunner.config import GenerateOptions

    loading = take(options, LOADING)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with recording(options, "chat") as profile:
        GenerateOptions.of(**options)  # complain before loading
        runner = load(model, loading, banner=interactive)
        profile.attach(runner)
        conversation = Conversation(runner, system, options)
        code = Repl(conversation, terminal_reader() if interactive else pipe_reader(), interactive=interactive).run()
    sys.exit(code)
