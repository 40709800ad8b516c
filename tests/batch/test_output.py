"""The file of answers, and what is written into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.batches import filled
from support.checks import has, raising

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.job import check_same
from mlxrunner.batch.output import AnswerFile, AnswerWriter, write_line
from mlxrunner.batch.store import Store, StoredAnswer, StoredLine
from mlxrunner.errors import DifferentRunError, OptionError, OutputError
from mlxrunner.models.fingerprint import option_parts
from mlxrunner.results import Result, Usage
from mlxrunner.testing import EOS, ByteTokenizer
from mlxrunner.tokenizer.base import Vocabulary

LINES = [b'{"index": 0}', b'{"index": 1, "text": "two"}', b"{}"]
WHOLE = b"".join(line + b"\n" for line in LINES)


def bodies(after: int = -1) -> Iterator[StoredAnswer]:
    return (StoredAnswer(i, i, line, False) for i, line in enumerate(LINES) if i > after)


@pytest.mark.parametrize("behind", [b"", b"\0" * 9], ids=["cut off", "zeros behind"])
@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_a_file_cut_off_at_any_byte_is_mended(tmp_path: Path, length: int, behind: bytes) -> None:
    """A torn line goes and what is missing is written, also if zeros follow the end."""
    file = tmp_path / "out"
    file.write_bytes(WHOLE[:length] + behind)
    with closing(AnswerFile.open(file)) as output:
        output.mend(bodies())
        assert file.read_bytes() in (
            WHOLE[: sum(len(line) + 1 for line in LINES[:count])] for count in range(4)
        )
        output.append(bodies(output.place))
    assert file.read_bytes() == WHOLE


@pytest.mark.parametrize(
    "content",
    [b"something else\n", WHOLE + b"more\n", WHOLE[:15].replace(b"0", b"1") + WHOLE[15:], b"\n"],
)
def test_a_file_that_somebody_else_wrote_to_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    """With what to do."""
    file = tmp_path / "out"
    file.write_bytes(content)
    with (
        closing(AnswerFile.open(file)) as output,
        pytest.raises(OutputError, match="not what this run wrote: move it away"),
    ):
        output.mend(bodies())
    assert file.read_bytes() == content


def test_what_cannot_be_written_is_one_line(tmp_path: Path, full: int) -> None:
    """A folder that is not there, a folder, a FIFO, a stream whose disk is full."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "no" / "out", tmp_path, tmp_path / "fifo"):
        with pytest.raises(OutputError, match="can't be written: "):
            AnswerFile.open(path)
    with (
        closing(AnswerFile.streaming(Path(f"/dev/fd/{full}"))) as output,
        pytest.raises(OutputError, match=rf"/dev/fd/{full}: can't be written: No space"),
    ):
        output.append(bodies())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_line_that_was_half_written_is_written_over(tmp_path: Path, error: Any) -> None:
    """After an interrupt or an error in the middle of it, by the same process."""

    class Breaking:
        def __init__(self, inner: Any) -> None:
            self.inner, self.left = inner, 20

        def write(self, data: memoryview) -> int:
            if not self.left:
                self.left = -1
                raise error
            count: int = self.inner.write(data[: self.left] if self.left > 0 else data)
            self.left -= count if self.left > 0 else 0
            return count

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    with closing(AnswerFile.open(tmp_path / "out")) as output:
        output._stream = Breaking(output._stream)  # type: ignore[assignment]
        with pytest.raises((KeyboardInterrupt, OutputError)):
            output.append(bodies())
        assert (tmp_path / "out").read_bytes() == WHOLE[:20]
        output.append(bodies(output.place))
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_the_store_has_everything_before_the_output_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed commit leaves the output as it was, and a failed write loses nothing."""
    out = tmp_path / "out"
    with filled([[1]] * 3, tmp_path / "run") as store, closing(AnswerFile.open(out)) as output:
        writer = AnswerWriter(store, output, "input")
        for index, (of, name) in enumerate([(AnswerFile, "append"), (Store, "commit")]):
            store.record(index, LINES[index])
            with monkeypatch.context() as patched, pytest.raises(OutputError):
                patched.setattr(of, name, raising(OutputError("full")))
                writer.flush()
        assert out.read_bytes() == b""
        writer.mend()
        writer.flush()
    assert out.read_bytes() == WHOLE[: WHOLE.index(b"{}")]


@pytest.mark.parametrize(("order", "first", "places"), [("input", 0, (0, 1)), ("done", 1, (1, 0))])
def test_a_line_waits_for_its_turn_in_the_store(
    order: Any, first: int, places: tuple[int, int], tmp_path: Path
) -> None:
    """In input order; as they finish with "done"."""
    out = tmp_path / "out"
    with filled([[1]] * 3) as store, closing(AnswerFile.open(out)) as output:
        with AnswerWriter(store, output, order) as writer:
            writer.write(1, LINES[1], failed=False)
            assert out.read_bytes().splitlines() == [LINES[1]] * first
            writer.write(0, LINES[0], failed=False)
        assert out.read_bytes().splitlines() == [LINES[place] for place in places]


USAGE = Usage.from_dict({
    'prompt_tokens': 30, 'matched_tokens': 20, 'cached_tokens': 20, 'evaluated_tokens': 10,
    'trimmed_tokens': 0, 'completion_tokens': 2, 'outcome': "hit", 'reason': None,
    'trim_limited_by': None, 'checkpoint': None, 'evicted_by': None, 'shifted_tokens': 0,
    'reevaluated_tokens': 0, 'tokenize_s': 0.0, 'lookup_s': 0.0, 'prefill_s': 0.1, 'ttft_s': 0.1,
    'decode_s': 0.1, 'cache_bytes': 1, 'peak_bytes': 1,
})  # fmt: skip  # fields by subject
HOSTILE = 'a"\\\n\r\x1b[2J\u2028\u202eé\U0001f600\x00'
LAST = (-0.1, {})
"""The log probabilities of the second token of each answer."""


def written(
    form: Any = "plain",
    first: dict[int, float] | None = None,
    *,
    error: str | None = None,
    refused: bool = True,
    tokenizer: ByteTokenizer | None = None,
    usage: bool = True,
) -> Any:
    """Return a line of the output. `first`: the likeliest first tokens, the own one first."""
    line = StoredLine(4, 6, None, "me" + HOSTILE, form)
    if error is not None:
        made = Outcome(line, error=error, is_refused=refused)
    else:
        logprobs: Any = first and [(next(iter(first.values())), first), LAST]
        made = Outcome(line, Result("hi" + HOSTILE, [104, 105], "stop", USAGE, logprobs))
    content = write_line(made, tokenizer or ByteTokenizer(), model="demo", usage=usage)
    assert b"\n" not in content
    assert all(32 <= byte < 127 for byte in content)
    return json.loads(content)


def logprobs_of(*arguments: Any, **more: Any) -> Any:
    return written(*arguments, **more)["response"]["body"]["choices"][0]["logprobs"]


def test_our_own_lines() -> None:
    """A line has id, index, text, finish_reason, usage or error, and cannot drive a terminal."""
    own = {"id": "me" + HOSTILE, "index": 4, "text": "hi" + HOSTILE, "finish_reason": "stop"}
    assert list(written().items()) == list({**own, "usage": USAGE.as_dict()}.items())
    assert written(usage=False) == own
    for error in ("line 6: is wrong", "is wrong"):
        failed = {"id": "me" + HOSTILE, "index": 4, "error": "line 6: is wrong"}
        assert written(error=error) == failed
    tops = [{"logprob": -0.5, "top": {"104": -0.5}}, {"logprob": -0.1, "top": {}}]
    assert written(first={104: -0.5})["logprobs"] == tops


def test_openai_chat_lines() -> None:
    """A line has the form of OpenAI's batch files: a response with a chat completion."""
    found = written("chat.completion", {104: -0.5, 33: -1.0})
    assert list(found) == ["id", "custom_id", "response", "error"]
    has(found, custom_id="me" + HOSTILE, error=None)
    has(found["response"], status_code=200, request_id="req_4")
    body = found["response"]["body"]
    assert body["created"] > 1_600_000_000
    has(body, id="chatcmpl-4", object="chat.completion", model="demo")
    (choice,) = body["choices"]
    message = {"role": "assistant", "content": "hi" + HOSTILE}
    has(choice, index=0, finish_reason="stop", message=message)
    h, bang = ({"token": a, "logprob": b, "bytes": [ord(a)]} for a, b in (("h", -0.5), ("!", -1.0)))
    assert choice["logprobs"]["content"][0] == {**h, "top_logprobs": [h, bang]}
    counts = {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 20}}


def test_openai_text_lines() -> None:
    """A text completion; without usage nothing in it depends on time."""
    body = written("text_completion", {104: -0.5}, usage=False)["response"]["body"]
    assert (body["object"], body["created"], "usage" in body) == ("text_completion", 0, False)
    assert body["choices"][0]["text"] == "hi" + HOSTILE
    values = {"token_logprobs": [-0.5, -0.1], "top_logprobs": [{"h": -0.5}, {}]}
    assert body["choices"][0]["logprobs"] == {"tokens": ["h", "i"], **values}


def test_what_is_impossible_is_a_number_too() -> None:
    """JSON has no infinity; as OpenAI's API says it."""
    first = {104: float("-inf")}
    ours = {"logprob": -9999.0, "top": {"104": -9999.0}}
    assert written(first=first)["logprobs"][0] == ours
    token = logprobs_of("chat.completion", first)["content"][0]
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_a_token_that_is_part_of_a_character_has_its_own_bytes() -> None:
    """The bytes of all tokens join to the answer, and no two tokens have the same name."""
    begin, end = "é".encode()
    partial = {begin: -0.5, end: -1.0, EOS: -2.0}
    token, _ = logprobs_of("chat.completion", partial)["content"]
    found = [(one["token"], one["bytes"]) for one in token["top_logprobs"]]
    assert found[:2] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
    assert bytes(found[2][1]).decode() == found[2][0] == ByteTokenizer().decode([EOS])
    first, _ = logprobs_of("text_completion", partial)["top_logprobs"]
    assert list(first.values()) == [-0.5, -1.0, -2.0]


def test_of_tokens_that_are_spelled_alike_the_likelier_one_is_kept() -> None:
    """SentencePiece has a letter, and its byte.

    A tokenizer without bytes of its own gives those of the text.
    """

    class Alike(ByteTokenizer):
        vocabulary = Vocabulary([b"a", b"a", b"b"])

    class Unknown(ByteTokenizer):
        @property
        def vocabulary(self) -> Vocabulary:
            raise OptionError("not byte by byte")

    tops = {0: -0.5, 1: -1.0, 2: -2.0}
    found = logprobs_of("text_completion", tops, tokenizer=Alike())
    assert found["top_logprobs"] == [{"a": -0.5, "b": -2.0}, {}]
    token, _ = logprobs_of("chat.completion", tops, tokenizer=Unknown())["content"]
    assert [one["bytes"] for one in token["top_logprobs"]] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("refused", "status", "kind"),
    [(True, 400, "invalid_request_error"), (False, 500, "server_error")],
)
def test_openai_errors(refused: bool, status: int, kind: str) -> None:
    """The status and the body of the API's own answer, and an error beside them."""
    found = written("chat.completion", error="no good", refused=refused)
    error = {"message": "line 6: no good", "type": kind, "param": None, "code": None}
    has(found["response"], status_code=status)
    assert found["response"]["body"]["error"] == error
    assert found["error"] == {"code": kind, "message": "line 6: no good"}


def test_a_difference_is_named_with_both_values() -> None:
    """Also one that is only on one side, and long ones not at full length."""
    was = option_parts({"max_tokens": 5, "stop": (), "top_p": 1.0, "seed": None})
    long = option_parts({"system": "x" * 500})
    check_same(was, dict(was), "out")
    for then, now, message in (
        (
            was,
            option_parts({"top_p": 0.5}) | long,
            r"^out was begun with another --top-p: 1.0 then, 0.5 now; --resume needs the same",
        ),
        ({}, long, r"another --system: not set then, \"x{79} \.\.\. now"),
        (was, option_parts({"top_p": 1.0}), "another --max-tokens: 5 then, not set now"),
    ):
        with pytest.raises(DifferentRunError, match=message) as found:
            check_same(then, now, "out")
        assert found.value.exit_code == 2
