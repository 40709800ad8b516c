"""An answer as a response, or as the stream of events that build one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from mlxrunner.batch.responses import message_item, response_object, response_usage, sealed
from mlxrunner.serve.apis.fields import report
from mlxrunner.serve.apis.openai.logprobs import chat_logprobs
from mlxrunner.serve.apis.openai.response_request import Conversation, ResponseRequest
from mlxrunner.serve.events import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    RefusedError,
    Text,
    Thought,
    Token,
)


class ResponseBody:
    """The response to one request, as far as it is made."""

    def __init__(self, body: ResponseRequest, conversation: Conversation) -> None:
        """Begin the response to the request `body`."""
        self._body, self._conversation = body, conversation
        self._created = int(time.time())
        self.output: list[dict[str, Any]] = []
        """The items that are complete."""

    def of(self, status: str, ended: Ended | None = None) -> dict[str, Any]:
        """Return the Response object, with the usage if the answer has ended."""
        body, asked = self._body, self._conversation.asked
        found = response_object(
            asked.id,
            status,
            created=self._created,
            model=asked.model,
            output=self.output,
            options=asked.options,
            effort=asked.effort,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        )
        found |= {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": asked.parallel_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "store": body.is_kept,
            "tool_choice": body.tool_choice or "auto",
            "truncation": body.truncation or "disabled",
            "usage": None,
        }
        if ended is not None:
            found["usage"] = _usage(ended)
            found["mlxrunner"] = report(ended, self._conversation.left_out)
        return found

    def message(self, name: str, text: str, tokens: list[Token], status: str) -> dict[str, Any]:
        """Return the item of a text."""
        return message_item(name, text, status=status, logprobs=self.logprobs(tokens))

    def logprobs(self, tokens: list[Token] | tuple[Token, ...]) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens; none if they were not asked for."""
        return chat_logprobs(tokens)

    def thought(self, name: str, text: str, status: str) -> dict[str, Any]:
        """Return the item of a thought."""
        item: dict[str, Any] = {"id": name, "type": "reasoning", "summary": [], "content": []}
        if text:
            item["content"] = [{"type": "reasoning_text", "text": text}]
        if self._body.seals_thinking:
            item["encrypted_content"] = sealed(text)
        return item | {"status": status}

    def call(
        self, name: str, call_id: str, function: str, arguments: str, status: str
    ) -> dict[str, Any]:
        """Return the item of a call. A function of a namespace is named as the client did."""
        item = {"id": name, "type": "function_call", "status": status, "call_id": call_id}
        item |= {"name": function, "arguments": arguments}
        if function in self._conversation.namespaces:
            item["namespace"], item["name"] = self._conversation.namespaces[function]
        return item


def _usage(ended: Ended) -> dict[str, Any]:
    used = ended.usage
    body = response_usage(
        used.prompt_tokens, used.cached_tokens, used.completion_tokens, ended.thinking_tokens
    )
    body["input_tokens_details"]["cache_write_tokens"] = used.prompt_tokens - used.cached_tokens
    return body


class StreamWriter:
    """Writes the events of one answer as theirs."""

    def __init__(
        self,
        body: ResponseRequest,
        conversation: Conversation,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """Begin a stream. `keep` is called with the response at its end."""
        self._response = ResponseBody(body, conversation)
        self._id, self._keep = conversation.asked.id.removeprefix("resp_"), keep
        self._sequence = 0
        self._kind: str | None = None
        """The type of the item that is open."""
        self._text = ""
        """The text, thought or arguments of that item so far."""
        self._tokens: list[Token] = []
        self._call = CallBegan(0, "", "")

    def begin(self) -> Iterator[bytes]:
        """Yield the events that come first."""
        yield self._event("response.created", response=self._response.of("in_progress"))
        yield self._event("response.in_progress", response=self._response.of("in_progress"))

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """Yield the events of an event of ours. A heartbeat is one more `response.in_progress`."""
        match event:
            case Text(text, tokens):
                if text or tokens:
                    yield from self._open("message")
                    yield from self._add_text(text, tokens)
            case Thought(text):
                if text:
                    yield from self._open("reasoning")
                    self._text += text
                    yield self._piece("response.reasoning_text.delta", delta=text)
            case CallBegan():
                yield from self._close()
                self._call = event
                yield from self._open("function_call")
            case CallArguments(_, text):
                self._text += text
                yield self._part("response.function_call_arguments.delta", delta=text)
            case CallEnded():
                yield from self._close()
            case Ended():
                yield from self._end(event)
            case _:
                response = self._response.of("in_progress")
                yield self._event("response.in_progress", response=response)

    def finish(self) -> Iterator[bytes]:
        """Yield nothing: the last event has ended the stream."""
        yield from ()

    def error(self, refused: RefusedError) -> bytes:
        """Return the frame of an error, which is the last one."""
        failed = self._response.of("failed")
        failed["error"] = {"code": _code(refused), "message": refused.message}
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(event))

    def _part(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        return self._event(
            kind, item_id=self._item_id, output_index=len(self._response.output), **fields
        )

    def _piece(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the only content of the open item."""
        return self._part(kind, content_index=0, **fields)

    @property
    def _item_id(self) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[self._kind or ""]
        return f"{prefix}_{self._id}_{len(self._response.output)}"

    def _item(self, status: str) -> dict[str, Any]:
        """Return the open item."""
        if self._kind == "message":
            return self._response.message(self._item_id, self._text, self._tokens, status)
        if self._kind == "reasoning":
            return self._response.thought(self._item_id, self._text, status)
        call = self._call
        return self._response.call(self._item_id, call.id, call.name, self._text, status)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an item of this type, if none is open."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind, self._text, self._tokens = kind, "", []
        item = self._item("in_progress")
        if kind != "function_call":
            item["content"] = []
        yield self._event(
            "response.output_item.added", output_index=len(self._response.output), item=item
        )
        if kind != "function_call":
            yield self._piece("response.content_part.added", part=self._content("in_progress"))

    def _content(self, status: str) -> dict[str, Any]:
        """Return the only content of the open item."""
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        content: dict[str, Any] = self._item(status)["content"][0]
        return content

    def _add_text(self, text: str, tokens: tuple[Token, ...]) -> Iterator[bytes]:
        self._text += text
        self._tokens.extend(tokens)
        logprobs = self._response.logprobs(tokens)
        yield self._piece("response.output_text.delta", delta=text, logprobs=logprobs)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the open item."""
        if self._kind is None:
            return
        if self._kind == "message":
            logprobs = self._response.logprobs(self._tokens)
            yield self._piece("response.output_text.done", text=self._text, logprobs=logprobs)
        elif self._kind == "reasoning":
            yield self._piece("response.reasoning_text.done", text=self._text)
        else:
            yield self._part("response.function_call_arguments.done", arguments=self._text)
        if self._kind != "function_call":
            yield self._piece("response.content_part.done", part=self._content(status))
        item, place = self._item(status), len(self._response.output)
        self._response.output.append(item)
        self._kind = None
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _end(self, ended: Ended) -> Iterator[bytes]:
        status = "incomplete" if ended.reason == "length" else "completed"
        yield from self._close(status)
        response = self._response.of(status, ended)
        self._keep(response)
        yield self._event(f"response.{status}", response=response)


def _code(refused: RefusedError) -> str:
    """Return their code of an error in a response."""
    if refused.code == "context_length_exceeded":
        return refused.code
    known = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return known.get(refused.status, "server_error")
