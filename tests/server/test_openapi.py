"""The description of all addresses, and requests made from it by schemathesis: none breaks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.sample import fewer
from support.scripted import Scripted, app_of

SCHEMA: Any = schemathesis.openapi.from_asgi("/openapi.json", app_of(Scripted()))
OPERATIONS = {
    f"{operation.ok().method.upper()} {operation.ok().path}": operation.ok()
    for operation in SCHEMA.get_all_operations()
}


KEYS = "type role content text name function id arguments schema effort".split()
"""Keys of objects in fields."""
FIELDS = set(
    "stop seed temperature top_p top_k max_tokens logprobs top_logprobs response_format text tools "
    "tool_choice logit_bias include reasoning schema template chat_template_kwargs "
    "structured_outputs system format options messages input prompt".split()
)
"""Fields that are read, whether the document names them or not."""


@pytest.fixture(autouse=True)
def without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request of a test reach a hub."""

    def download(name: str, **_: Any) -> Path:
        raise AssertionError(name)

    monkeypatch.setattr("mlxrunner.models.resolve.download", download)


def test_each_address_and_each_body_is_described() -> None:
    paths = "v1/messages v1/messages/count_tokens v1/chat/completions v1/completions v1/responses "
    paths += "api/chat api/generate api/show api/pull"
    asked = {f"GET /{path}" for path in "v1/models api/tags api/ps api/version".split()}
    assert asked | {f"POST /{path}" for path in paths.split()} <= OPERATIONS.keys()
    names = "ChatCompletion Completion Response Message OllamaChat"
    assert {f"{name}Request" for name in names.split()} <= BODIES.keys()


BODIES = {
    name: body["properties"]
    for name, body in SCHEMA.raw_schema["components"]["schemas"].items()
    if name.endswith("Request")
}
"""The fields of each body that a client sends, by the name of its class."""
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", BODIES)
def test_each_field_of_a_body_is_named_on_a_page(name: str) -> None:
    """A client's author reads there what may be sent."""
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert {one for one in BODIES[name] if not re.search(rf'[`."]{one}[`:"]', pages)} == set()


def tries(count: int, least: int) -> settings:
    return settings(
        max_examples=fewer(count, least),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_breaks_the_server(name: str) -> None:
    """Each gets an answer, or an error of its own."""

    @given(case=OPERATIONS[name].as_strategy())
    @tries(20, 3)
    def run(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500 or name == "POST /api/pull", response.text
        assert "Traceback" not in response.text

    run()


HI = [{"role": "user", "content": "a"}]


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/api/chat", {"messages": HI}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_value_of_a_field_breaks_the_server(path: str, body: dict[str, Any]) -> None:
    """Each field of a request that would be answered gets any JSON value."""
    from starlette.testclient import TestClient

    client = TestClient(app_of(Scripted()), raise_server_exceptions=False)
    described = OPERATIONS[f"POST {path}"].body[0].definition["schema"].get("properties", ())
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=3)
        ),
        max_leaves=5,
    )

    @given(name=st.sampled_from(sorted(FIELDS | set(described))), value=values)
    @tries(100, 20)
    def run(name: str, value: Any) -> None:
        try:
            response = client.post(path, json={"model": "a", **body, name: value})
        except (ValueError, UnicodeEncodeError):
            return  # the client can't write it
        assert response.status_code < 500, (name, value, response.text)

    run()
