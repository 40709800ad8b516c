"""A plugin for Simon Willison's `llm`: `llm -m mlxrunner/MODEL`.

`llm` finds this module by its entry point, and nothing else imports it. The process keeps one
runner, so that the turns of a conversation reuse what the ones before have evaluated. This knows
nothing about the command line of either program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import click
import llm
from llm.parts import TextPart
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from mlxrunner.config.option import Option, described
from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.download import repositories
from mlxrunner.options import GenerateOptions, RunnerSettings, chat_options

PREFIX = "mlxrunner/"
LOADING = ("context", "kv_bits", "prefill_step")
"""Settings of a runner that `llm -o` knows. Another value loads the model again."""


class RequestFailedError(llm.ModelError, click.ClickException):
    """An error of one line: `llm chat` would show the traceback of any but click's."""


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the demo model, the models of the hub cache, and the one of MLXRUNNER_MODEL."""
    chosen = os.environ.get("MLXRUNNER_MODEL")
    for name in dict.fromkeys(["demo", *repositories(), *([chosen] if chosen else [])]):
        register(MlxrunnerModel(name))


def _field(name: str, option: Option) -> Any:
    """Return the type and the description of one option, which is unset by default."""

    def read(value: Any) -> Any:
        return option.parse(name, value) if isinstance(value, str) else value

    def check(value: Any) -> Any:
        if value is not None and not option.is_list:
            option.check(name, value)
        return value

    kind: Any = tuple[str, ...] if option.is_list else option.kind
    checked = Annotated[kind | None, BeforeValidator(read), AfterValidator(check)]
    return checked, Field(default=None, description=option.help.split(" [default")[0])


def _settings() -> Iterator[tuple[str, Option]]:
    yield from chat_options()
    yield from ((name, described(RunnerSettings)[name]) for name in LOADING)


Options = create_model(
    "Options", __base__=llm.Options, **{name: _field(name, one) for name, one in _settings()}
)
"""The options of a request and of loading, made from their only descriptions."""


class MlxrunnerModel(llm.Model):
    """A model that this program runs, under the name mlxrunner/NAME."""

    can_stream = True
    Options = Options  # type: ignore[assignment]  # made by pydantic
    _loaded: ClassVar[tuple[Any, Any] | None] = None
    """The model and settings that the runner of this process was loaded with, and the runner."""

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, f"{PREFIX}{name}"
        self.supports_schema = find_spec("llguidance") is not None

    def __str__(self) -> str:
        return f"mlxrunner: {self.model_id}"

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Yield the answer, and set the usage of `response`. Raise RequestFailedError."""
        try:
            yield from self._answer(prompt, stream, response)
        except MlxrunnerError as error:
            raise RequestFailedError(str(error)) from error

    def _answer(self, prompt: llm.Prompt, stream: bool, response: llm.Response) -> Iterator[str]:
        given = prompt.options.model_dump(exclude_none=True)
        loading = {name: given.pop(name) for name in LOADING if name in given}
        if prompt.schema is not None:
            given["schema"] = json.dumps(prompt.schema)
        GenerateOptions.of(**given)  # raise its errors before loading
        runner = self._runner(loading)
        text, last = "", None
        for last in runner.generate(_messages(prompt), **{**runner.suggested_options, **given}):
            text += last.text
            if stream and last.text:
                yield last.text
        if not stream:
            yield text
        if last is not None and last.usage is not None:
            usage = last.usage
            response.set_usage(
                input=usage.prompt_tokens,
                output=usage.completion_tokens,
                details={"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}},
            )
            response.response_json = {
                "finish_reason": last.finish_reason,
                "usage": usage.as_dict(),
            }

    def _runner(self, loading: dict[str, Any]) -> Any:
        """Return the runner of this process. Load it if it has another model or settings."""
        from mlxrunner.models.resolve import resolve
        from mlxrunner.runner import Runner
        from mlxrunner.terminal.output import loading as loading_bar

        asked = (self.name, loading)
        kept = MlxrunnerModel._loaded
        if kept is not None and kept[0] == asked:
            return kept[1]
        RunnerSettings.of(**loading)
        if kept is not None:
            kept[1].close()  # two models at once may be too much
            MlxrunnerModel._loaded = None
            del kept
        resolve(self.name)  # a download shows a bar of its own
        with loading_bar(self.name) as show:
            runner = Runner.load(self.name, progress=show, **loading)
        MlxrunnerModel._loaded = asked, runner
        return runner


def _messages(prompt: llm.Prompt) -> list[dict[str, str]]:
    """Return the whole conversation up to this prompt, its texts only."""
    return [
        {
            "role": message.role,
            "content": "".join(part.text for part in message.parts if isinstance(part, TextPart)),
        }
        for message in prompt.messages
    ]
