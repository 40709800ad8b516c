"""OpenAI's completions: raw text goes on, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlxrunner.batch.openai_format import READ, TokenLogprob, completion_usage, text_logprobs
from mlxrunner.config.request_fields import held
from mlxrunner.serve.delivery import (
    WholeAnswer,
    client_of,
    route_class,
    stream_answers,
    whole_answers,
)
from mlxrunner.serve.events import (
    AnswerEnd,
    AnswerEvent,
    ApiError,
    Client,
    ServerRequest,
    TextDelta,
    ThinkingDelta,
)
from mlxrunner.serve.fields import headers, report, unread
from mlxrunner.serve.models import AnswerBackend
from mlxrunner.serve.openai import (
    FINISH_REASONS,
    MOST_ANSWERS,
    ChunkWriter,
    SampledRequest,
    head,
    options_of,
    with_seed,
)

RAW = READ - {"tools", "tool_choice", "parallel_tool_calls", "documents"}
"""The fields that may come with raw text. A chat template would write the others."""


class CompletionRequest(SampledRequest):
    """The body of a request for completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None


def read(body: CompletionRequest, client: Client, request_id: str) -> list[ServerRequest]:
    """Return what a body asks for: `n` requests for each prompt. Raise ApiError."""
    extra = dict(body.model_extra or {})
    if extra.get("add_special_tokens") is True:
        del extra["add_special_tokens"]  # as they are where the model wants them
    extra = held(extra, RAW)
    if body.best_of not in (None, body.n):
        raise ApiError(
            400,
            f"best_of: {body.best_of} is not supported, only the same number as n: {body.n}",
            param="best_of",
        )
    prompts = _prompts(body.prompt)
    if len(prompts) * body.n > MOST_ANSWERS:
        raise ApiError(
            400,
            f"prompt: {len(prompts)} prompts with n={body.n} are more than {MOST_ANSWERS} answers: "
            "send them in several requests, or use mlxrunner batch",
            param="prompt",
        )
    if body.echo:
        _check_echo(body, prompts)
    options, _ = options_of({**extra, "logprobs": body.logprobs}, counts_logprobs=True)
    return [
        ServerRequest(
            protocol="completions",
            model=body.model,
            prompt=prompt,
            options=with_seed(options, number),
            client=client,
            id=request_id if number == place == 0 else f"{request_id}-{place * body.n + number}",
        )
        for place, prompt in enumerate(prompts)
        for number in range(body.n)
    ]


def _prompts(given: str | Sequence[Any]) -> list[str | list[int]]:
    """Return the prompts: one, or several. Raise ApiError for one that is empty."""
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: it is empty", param="prompt")
    return prompts


def _check_echo(body: CompletionRequest, prompts: Sequence[str | list[int]]) -> None:
    if body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(
            400,
            "echo: it is not supported with logprobs, or with a prompt of tokens",
            param="echo",
        )


class CompletionWriter(ChunkWriter):
    """Writes answers as completions, or as the stream of their chunks."""

    def __init__(self, body: CompletionRequest, several: Sequence[ServerRequest]) -> None:
        left_out = unread(body.model_extra or {})
        super().__init__("text_completion", several, usage=body.has_usage, left_out=left_out)
        self._body = body
        self._offsets = [len(self._echoed(number)) for number in range(len(several))]

    def _echoed(self, number: int) -> str:
        """Return the prompt that comes before the answer; empty if it is not wanted."""
        return str(self._several[number].prompt) if self._body.echo else ""

    def body(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return the object of whole answers."""
        choices = [
            self._choice(
                number,
                self._echoed(number) + "".join(_texts(answer)),
                answer.tokens,
                FINISH_REASONS[answer.end.reason],
            )
            for number, answer in enumerate(answers)
        ]
        ends = [answer.end for answer in answers]
        found = head(self._several[0], "text_completion", self._created) | {"choices": choices}
        return found | {"usage": self.usage(ends), "mlxrunner": report(ends[0], self._left_out)}

    def begin(self) -> Iterator[bytes]:
        """Yield the prompts, if they are wanted."""
        for number in range(len(self._several)):
            if self._echoed(number):
                yield self._chunk(number, self._echoed(number))

    def write(self, index: int, event: AnswerEvent) -> Iterator[bytes]:
        """Yield the chunks of an event. A heartbeat is a comment and a chunk without text."""
        match event:
            case TextDelta(text, tokens):
                if text or tokens:
                    yield self._chunk(index, text, tokens)
            case ThinkingDelta(text):
                yield self._chunk(index, text)
            case AnswerEnd():
                choice = self._choice(index, "", (), FINISH_REASONS[event.reason])
                yield self.end(index, event, choice)
            case _:
                yield b": heartbeat\n\n" + self._chunk(index, "")

    def usage(self, ends: Sequence[AnswerEnd]) -> dict[str, Any]:
        """Return the usage of all answers. Each prompt is counted once."""
        each = ends[:: self._body.n]
        return completion_usage(
            sum(end.usage.prompt_tokens for end in each),
            sum(end.usage.cached_tokens for end in each),
            sum(end.usage.completion_tokens for end in ends),
        )

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        return self.frame([self._choice(index, text, tokens, None)])

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = text_logprobs(tokens) if tokens else None
        if logprobs is not None:
            ends = [*accumulate((len(one.text) for one in tokens), initial=self._offsets[index])]
            logprobs["text_offset"], self._offsets[index] = ends[:-1], ends[-1]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _texts(answer: WholeAnswer) -> Iterator[str]:
    """Yield all text of an answer: nothing in raw text is thinking."""
    for part in answer.parts:
        if isinstance(part, TextDelta | ThinkingDelta):
            yield part.text


def router(answers: AnswerBackend) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=route_class("cmpl-"), tags=["openai"])

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Go on with raw text, as a completion or as a stream of chunks."""
        body.model = body.model or answers.card("").name
        client = client_of(request, body.prompt_cache_key or body.user)
        several = read(body, client, request.state.id)
        writer = CompletionWriter(body, several)
        if body.stream:
            return await stream_answers(request, answers, several, writer)
        found = await whole_answers(request, answers, several)
        return JSONResponse(writer.body(found), headers=headers(several[0], found[0].end))

    return routes
