"""The responses that are kept in memory, for `previous_response_id` and for their own address."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlxrunner.serve.events import RefusedError

MOST_RESPONSES = 1024
"""The most responses that are kept."""
MOST_BYTES = 2**26
"""The most bytes of JSON that they have together."""
Item = Mapping[str, Any]


@dataclass(frozen=True)
class KeptResponse:
    """A response, and what it answered."""

    body: dict[str, Any]
    items: Sequence[Item]
    """The items of its own request."""
    before: KeptResponse | None
    """The response that it went on from."""
    nbytes: int = 0

    @property
    def history(self) -> list[Item]:
        """All items of the conversation, with this answer at the end."""
        chain: list[KeptResponse] = []
        link: KeptResponse | None = self
        while link is not None:
            chain.append(link)
            link = link.before
        return [item for one in reversed(chain) for item in (*one.items, *one.body["output"])]


class KeptResponses:
    """Keeps the latest responses. Those that were used longest ago are forgotten first."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        """Keep at most `most` responses, and `most_bytes` of them."""
        self._most, self._most_bytes = most, most_bytes
        self._by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        self._nbytes = 0

    def add(self, body: dict[str, Any], items: Sequence[Item], before: KeptResponse | None) -> None:
        """Keep a response and the items that it answered."""
        nbytes = len(msgspec.json.encode([body, items]))
        self._by_id[body["id"]] = KeptResponse(body, items, before, nbytes)
        self._nbytes += nbytes
        while len(self._by_id) > self._most or self._nbytes > self._most_bytes:
            self._nbytes -= self._by_id.popitem(last=False)[1].nbytes

    def find(self, name: str) -> KeptResponse | None:
        """Return the response with this id; None if it is not kept."""
        if name in self._by_id:
            self._by_id.move_to_end(name)
        return self._by_id.get(name)

    def previous(self, name: str) -> KeptResponse:
        """Return the response to go on from. Raise RefusedError if it is not kept."""
        found = self.find(name)
        if found is None:
            raise RefusedError(
                400,
                f"previous_response_id: {name!r:.80} is not kept: it was never stored, or "
                "forgotten since; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found

    def item(self, name: str) -> Item | None:
        """Return the item of an answer with this id; None if it is not kept."""
        for kept in reversed(self._by_id.values()):
            output: list[Item] = kept.body["output"]
            for item in output:
                if item.get("id") == name:
                    return item
        return None

    def remove(self, name: str) -> bool:
        """Forget a response. Return False if it is not kept."""
        found = self._by_id.pop(name, None)
        self._nbytes -= found.nbytes if found else 0
        return found is not None
