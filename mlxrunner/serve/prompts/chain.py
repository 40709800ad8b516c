"""Digests of messages, by which a conversation is known again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any


def digest(value: Any) -> bytes:
    """Return the digest of a JSON value. The order of its keys does not count."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def message_digest(message: Mapping[str, Any]) -> bytes:
    """Return the digest of what a message says and shows.

    Thinking, ids and white space around it do not count.
    """
    content = str(message.get("content") or "").strip()
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    pictures = message.get("pictures")
    if pictures:
        return digest([message["role"], content, calls, pictures])
    if not calls:
        body = f"{message['role']}\0{content}"
        return blake2b(body.encode(errors="surrogatepass"), digest_size=16).digest()
    return digest([message["role"], content, calls])


def chain(digests: Sequence[bytes]) -> list[bytes]:
    """Return a digest of the messages before each message, and of all."""
    links = [b""]
    for one in digests:
        links.append(blake2b(links[-1] + one, digest_size=16).digest())
    return links
