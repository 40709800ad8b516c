"""An answer in a form may break off anywhere: the entry is what was evaluated."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.forms import SCHEMAS, FewLetters, ask, build, tokens
from support.sample import fewer

from mlxrunner import FormError, Runner
from mlxrunner.testing import oracle_runner


def test_a_dead_end_is_an_error_and_the_entry_stays_true() -> None:
    """A text that can be begun but not ended."""
    runner, prompt = build(tokenizer=FewLetters()), [1, 2, 3]
    shown = []
    with pytest.raises(
        FormError, match="after 3 tokens of the answer, no token of the model fits the schema"
    ) as raised:
        for chunk in runner.generate(prompt, schema={"const": "abz"}):
            shown.append(chunk.token)
    assert raised.value.tokens == 3
    assert bytes(shown) == b'"ab'
    assert runner.entry.is_true
    assert bytes(runner.entry.tokens[3:]) == b'"ab'
    after = [*prompt, *b'"ab', 9]
    chunks = ask(runner, after, max_tokens=5, stop_tokens=[])
    assert chunks[-1].usage.cached_tokens == 6  # type: ignore[union-attr]
    assert tokens(chunks) == tokens(ask(build(), after, max_tokens=5, stop_tokens=[]))


def test_a_processor_that_forces_another_token_is_an_error(llama: Runner) -> None:
    """Not an answer in another form."""
    with pytest.raises(FormError, match="after 1 tokens"):
        ask(
            llama,
            choices=["yes"],
            logits_processors=[lambda history, logits: mx.zeros_like(logits)],
        )


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    "kinds",
    [["full", "full"], ["recurrent", "full"], ["sliding", "chunked"]],
    ids=lambda kinds: kinds[0],
)
def test_however_a_request_ends_the_entry_is_what_was_evaluated(kinds: list[str]) -> None:
    """Closed after each chunk, an error or Ctrl-C in each forward pass and before each token."""
    schema, prompt, follow_up = SCHEMAS["object"], list(range(20)), [*range(15), 7, 7]

    def runner() -> Runner:
        return oracle_runner(kinds, checkpoint_interval=5, checkpoint_budget=10**6)

    whole = ask(runner(), prompt, schema=schema)
    expected = tokens(ask(runner(), follow_up, schema=schema))

    def check(used: Runner) -> None:
        assert used.entry.is_true
        assert used.entry.tokens == [*prompt, *tokens(whole)][: len(used.entry.tokens)]
        assert tokens(ask(used, follow_up, schema=schema)) == expected

    stride = fewer(3, 6)
    for read in range(0, len(whole), stride):
        used = runner()
        answer = used.generate(prompt, schema=schema)
        assert tokens([next(answer) for _ in range(read)]) == tokens(whole)[:read]
        answer.close()  # type: ignore[attr-defined]
        check(used)
    for error in (KeyboardInterrupt(), RuntimeError("from the model")):
        for forward in range(1, len(whole) + 3, 3 * stride):
            used = runner()

            def on_layer(
                index: int,
                used: Runner = used,
                forward: int = forward,
                error: BaseException = error,
            ) -> None:
                if len(used.model.forwards) == forward and index == 1:
                    raise error

            used.model.on_layer = on_layer
            with pytest.raises(type(error)):
                ask(used, prompt, schema=schema, speculate="off")
            used.model.on_layer = lambda index: None
            check(used)

    for place in range(0, len(whole), stride):
        used = runner()

        def interrupt(history: mx.array, logits: mx.array, place: int = place) -> mx.array:
            if history.shape[0] == len(prompt) + place:
                raise KeyboardInterrupt
            return logits

        with pytest.raises(KeyboardInterrupt):
            ask(used, prompt, schema=schema, logits_processors=[interrupt])
        check(used)
