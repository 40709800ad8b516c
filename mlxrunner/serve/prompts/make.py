"""Make the prompt of a request: its messages through the model's chat template, as tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrunner.cache.tokens import as_tokens
from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.load import LoadedModel
from mlxrunner.results import Chunk
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.prompts.formats import CallFormat, format_of
from mlxrunner.serve.prompts.reader import AnswerReader
from mlxrunner.serve.prompts.split import AnswerSplitter
from mlxrunner.templates.messages import PlainMessage, check_messages
from mlxrunner.templates.rendering import read_json, read_template
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import TokenizedPrompt, tokenize_prompt


@dataclass(frozen=True)
class Made:
    """A prompt that is ready to run, and what was done to make it."""

    prompt: TokenizedPrompt
    options: dict[str, Any]
    """Options of `ParallelRunner.submit`."""
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""
    opens: str = ""
    """The end of the prompt's text, which may have opened the thinking."""
    rendered: str = ""
    """The text as the template wrote it."""
    messages: Sequence[PlainMessage] = field(default=())


class PromptMaker:
    """Makes prompts for one model, and splits its answers."""

    def __init__(self, tokenizer: Tokenizer, template: str = "", parser: str | None = None) -> None:
        """Make a maker for a model's `tokenizer` and chat `template`.

        `parser`: the name of mlx-lm's parser of tool calls, if the model's files name one.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.form: CallFormat = format_of(template, tokenizer, parser)

    @classmethod
    def of(cls, loaded: LoadedModel) -> PromptMaker:
        """Make a maker for a loaded model."""
        config = read_json(loaded.folder / "tokenizer_config.json")
        template = read_template(loaded.folder, config) or ""
        parser = config.get("tool_parser_type")
        return cls(loaded.tokenizer, template, parser if isinstance(parser, str) else None)

    def make(self, asked: Asked) -> Made:
        """Make the prompt of a request. Raise RefusedError if the model can't take it."""
        began = time.perf_counter()
        try:
            if asked.prompt is not None:
                prompt = tokenize_prompt(self.tokenizer, asked.prompt)
                return Made(prompt, self._options(asked), opens=prompt.text[-100:])
            return self._conversation(asked, began)
        except MlxrunnerError as error:
            raise RefusedError(400, str(error)) from error

    def splitter(self, made: Made, asked: Asked) -> AnswerSplitter:
        """Return a splitter for the answer to a prompt."""
        form = self.form if asked.tools else None
        reader = AnswerReader(form, asked.tools, prompt=made.opens)
        return AnswerSplitter(
            reader, asked.id, self.tokenizer.decode, parallel=asked.parallel_calls
        )

    def keep(self, made: Made, chunks: Sequence[Chunk]) -> None:
        """Remember the tokens of an answer as they were generated."""

    def _conversation(self, asked: Asked, began: float) -> Made:
        messages = check_messages(asked.messages)
        variables = self._variables(asked)
        text = self.tokenizer.render(messages, **variables)
        tokens = as_tokens(self.tokenizer.encode(text))
        seconds = time.perf_counter() - began
        prompt = TokenizedPrompt(tokens, "messages", messages, text, variables, seconds)
        return Made(prompt, self._options(asked), (), text[-100:], text, messages)

    def _variables(self, asked: Asked) -> dict[str, Any]:
        """Return the variables of the chat template."""
        variables = dict(asked.variables)
        if asked.tools:
            variables["tools"] = [dict(tool) for tool in asked.tools]
        if asked.thinking is not None:
            variables.setdefault("enable_thinking", asked.thinking)
        if asked.effort is not None:
            variables.setdefault("reasoning_effort", asked.effort)
        return variables

    def _options(self, asked: Asked) -> dict[str, Any]:
        options = dict(asked.options)
        if asked.deadline is not None:
            options["deadline"] = asked.deadline
        return options
