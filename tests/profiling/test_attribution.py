"""A prompt that leaves the entry is placed right, for every part in eight template families."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.families import KINDS, Piece
from support.models import write_tokenizer
from support.sample import fewer

from mlxrunner.cache.account import (
    WINDOW,
    ConversationName,
    Lookup,
    PrefixIndex,
    PriorRequest,
    PromptAccount,
)
from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.profiling.divergence import Divergences
from mlxrunner.profiling.schema import Divergence
from mlxrunner.templates.messages import common
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.prompt import TokenizedPrompt

CONVERSATIONS = fewer(3, 2)
"""Each is edited in some 80 ways, in each family."""
WANTED = 0.98
WORDS = (
    "blue cars red bikes the weather in Paris is fine today and tomorrow rain user system "
    "assistant model tool result name "
    'größe straße 日本語 [INST] {} "quoted" 3.14 end. why? so, I think that 12 of 40 were late; '
    "call "
    "it a day"
).split()


class Case(NamedTuple):
    """A prompt with its answer, and the prompt that follows.

    `ended`: the end token was evaluated as well.
    """

    what: str
    chat: list[dict[str, str]]
    answer: str
    ended: bool
    after: list[dict[str, str]]
    before_variables: dict[str, Any]
    variables: dict[str, Any]


def text(rng: random.Random, most: int = 12) -> str:
    return rng.choice([" ", " ", "\n"]).join(rng.choices(WORDS, k=rng.randint(1, most)))


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def edits(rng: random.Random, content: str) -> Iterator[tuple[str, str]]:
    """Yield a text changed at its beginning, middle and end, cut, continued, and emptied."""
    words = content.split(" ")
    yield "first word", " ".join([rng.choice(WORDS) + "x", *words[1:]])
    yield "a word", " ".join([*words[: len(words) // 2], "other", *words[len(words) // 2 + 1 :]])
    yield "a letter", content[: len(content) // 2] + "z" + content[len(content) // 2 + 1 :]
    yield "cut", content[: max(1, len(content) * 2 // 3)].rstrip() or "a"
    yield "gone on with", f"{content} {rng.choice(WORDS)}"
    yield "emptied", ""


class Cases:
    """A conversation in the words of a family of templates, and the prompts that may follow it."""

    def __init__(self, family: str, seed: int) -> None:
        rng, kind = random.Random(f"{family} {seed}"), KINDS[family]
        self.family, self.rng, self.has_tools = family, rng, kind.has_tools
        count = 2 if seed % 3 and kind.has_tools else 0
        names = ((rng.choice(WORDS[:8]), text(rng)) for _ in range(count))
        self.tools = [{"name": name, "description": said} for name, said in names]
        self.thinks = seed % 2 == 1
        call = json.dumps({"name": "weather", "arguments": {"in": text(rng, 3)}})
        self.chat = [said("system", text(rng))] if seed % 4 else []
        for role in "user assistant user call tool assistant user".split():
            self.chat.append(said("assistant", call) if role == "call" else self._turn(role))
        self.thought, self.told = text(rng), text(rng)
        self.answer = self.told
        if self.thinks or family == "glm":
            thought = self.thought if self.thinks else ""
            self.answer = kind.thinks.format(thought, self.told)
        self.sent = self.told
        if self.thinks and family != "harmony":
            self.sent = f"<think>\n{self.thought}\n</think>\n\n{self.told}"
        self.ended = seed % 5 > 1
        self.next = said("user", text(rng))
        self.more = [said("assistant", self.sent), self.next]

    def _turn(self, role: str) -> dict[str, str]:
        return said(role, f"result: {text(self.rng)}" if role == "tool" else text(self.rng))

    def _case(self, what: str, after: list[dict[str, str]], **variables: Any) -> Case:
        given = {"tools": self.tools} if self.tools else {}
        return Case(what, self.chat, self.answer, self.ended, after, given, {**given, **variables})

    def __iter__(self) -> Iterator[Case]:
        yield self._case("goes on", [*self.chat, *self.more])
        for index in range(len(self.chat)):
            yield from self._message(index)
        yield from self._last_answer()
        yield from self._tools()
        yield from self._variables()

    def _message(self, index: int) -> Iterator[Case]:
        """Edit, drop or rename a message, and insert one after it."""
        before, message, after = self.chat[:index], self.chat[index], self.chat[index + 1 :]
        after = [*after, *self.more]
        who = "call" if message["content"].startswith("{") else message["role"]
        for how, content in edits(self.rng, message["content"]):
            changed = {**message, "content": content}
            yield self._case(f"{who} {how}", [*before, changed, *after])
        yield self._case(f"{message['role']} dropped", [*before, *after])
        inserted = said("user", text(self.rng))
        yield self._case("user inserted", [*before, message, inserted, *after])
        role = {"user": "assistant", "assistant": "user", "tool": "user"}.get(message["role"])
        if role:
            yield self._case("another role", [*before, {**message, "role": role}, *after])

    def _last_answer(self) -> Iterator[Case]:
        """Edit the answer and its thinking, or leave them out."""
        chat, told = self.chat, self.told
        for how, content in edits(self.rng, told):
            sent = said("assistant", self.sent.removesuffix(told) + content)
            yield self._case(f"answer {how}", [*chat, sent, self.next])
        for how, content in edits(self.rng, self.thought) if self.thinks else ():
            sent = said("assistant", self.sent.replace(self.thought, content))
            yield self._case(f"thinking {how}", [*chat, sent, self.next])
        yield self._case("thinking left out", [*chat, said("assistant", told), self.next])
        yield self._case("answer dropped, user goes on", [*chat, self.next])
        yield self._case("a tool result instead", [*chat, said("tool", text(self.rng))])

    def _tools(self) -> Iterator[Case]:
        after, clock = [*self.chat, *self.more], {"name": "clock"}
        if not self.tools:
            if self.has_tools:
                yield self._case("tools come", after, tools=[clock])
            return
        first, *rest = self.tools
        other = [{**first, **clock}, *rest]
        wordy = [{**first, "description": first["description"] + " at once"}, *rest]
        for what, now in {
            "renamed": other,
            "dropped": rest,
            "added": [*self.tools, *other],
            "all gone": [],
            "described otherwise": wordy,
        }.items():
            yield self._case(f"tools {what}", after, tools=now)

    def _variables(self) -> Iterator[Case]:
        after = [*self.chat, *self.more]
        if self.family == "llama3":
            yield self._case("another date", after, date_string="27 Jul 2024")
        if self.family in ("qwen3", "glm"):
            yield self._case("thinking switched off", self.chat, enable_thinking=False)
            yield self._case("thinking switched off", after, enable_thinking=False)


def _pieces(family: str, chat: list[dict[str, str]], variables: dict[str, Any]) -> list[Piece]:
    given = {"tools": [], **variables}
    return [piece for piece in KINDS[family].pieces(chat, **given) if piece[0]]


def _answered(family: str, case: Case) -> list[Piece]:
    """The answer and, where it was evaluated, its end."""
    kind, message = KINDS[family], len(case.chat)
    begin, _, rest = kind.thinks.partition("{}")
    between = rest.partition("{}")[0]
    if case.answer.startswith(begin) and between in case.answer:
        thought, _, told = case.answer.removeprefix(begin).partition(between)
        close = between.rstrip().removesuffix("<|start|>assistant<|channel|>final<|message|>")
        lead = len(begin) - len(begin.lstrip())
        spelled = [
            (begin[:lead], "text"),
            (begin[lead:] + thought + close, "thinking"),
            (between[len(close) :] + told, "text"),
        ]
    else:
        spelled = [(case.answer, "text")]
    if case.ended:
        spelled.append((kind.marks[-1], "message_end"))
    return [(piece, message, "assistant", part) for piece, part in spelled if piece]


def _at(pieces: list[Piece], at: int) -> tuple[Any, ...]:
    """Whose character `at` is; of the last one, past the end."""
    for piece in pieces:
        at -= len(piece[0])
        if at < 0:
            return piece[1:]
    return pieces[-1][1:]


def _spelled(pieces: list[Piece]) -> str:
    return "".join(piece[0] for piece in pieces)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return a byte-level BPE per family, whose merges go over spaces, line ends and headers."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = {}
    for name, kind in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder, chat_template=kind.template, eos_token=kind.marks[-1])
        fast = Fast(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        firsts = (next(iter(Cases(name, 1000 + seed))) for seed in range(40))
        corpus = [_spelled(_pieces(name, case.after, case.variables)) for case in firsts]
        special = ["<s>", "</s>", *(mark for mark in kind.marks if mark != "</s>")]
        for mark in special:
            corpus = [piece for one in corpus for piece in one.split(mark)]
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            max_token_length=12,
        )
        fast.train_from_iterator(corpus, trainer)
        fast.add_special_tokens(special)
        fast.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        made[name] = load_tokenizer(folder)
    return made


def _prepared(
    tokenizer: Tokenizer, chat: list[dict[str, str]], variables: dict[str, Any]
) -> TokenizedPrompt:
    rendered = tokenizer.render(chat, **variables)  # type: ignore[arg-type]
    return TokenizedPrompt(
        as_tokens(tokenizer.encode(rendered)), "messages", chat, rendered, variables
    )  # type: ignore[arg-type]


def _found(
    tokenizer: Tokenizer, before: TokenizedPrompt, entry: TokenArray, after: TokenizedPrompt
) -> Divergence | None:
    matched = common_prefix(entry, after.tokens)
    index = PrefixIndex()
    earlier = PriorRequest(
        entry, *index.fingerprints(before.tokens), ConversationName(), source=before
    )
    lookup = Lookup(len(after.tokens), len(entry), matched, matched)
    account = PromptAccount(earlier=earlier, shared=matched)
    return Divergences(tokenizer).describe(after, after.tokens, lookup, account)


def _differs(
    tokenizer: Tokenizer, index: int, entry: TokenArray, prompt: TokenArray, at: int
) -> int:
    """Return the first character that differs.

    Where the same text continues for long in other tokens, that of the first two of these.
    """
    remembered = tokenizer.decode(entry[: index + WINDOW].tolist())
    if at < len(remembered):
        return at
    one, other = (
        tokenizer.decode(tokens[index : index + 1].tolist()) for tokens in (entry, prompt)
    )
    return len(tokenizer.decode(entry[:index].tolist())) + common(one, other)


@pytest.mark.parametrize("family", KINDS)
def test_the_place_is_the_one_of_the_first_character_that_differs(
    family: str, merging: dict[str, Tokenizer]
) -> None:
    """Message, role and part are right on both sides of 98 % of all edits.

    The message that is named is the one that was edited.
    """
    tokenizer, right, wrong = merging[family], 0, Counter[str]()
    examples: dict[str, str] = {}
    for seed in range(CONVERSATIONS):
        for case in Cases(family, seed):
            try:
                before = _prepared(tokenizer, case.chat, case.before_variables)
                after = _prepared(tokenizer, case.after, case.variables)
            except PromptError:  # Gemma, an answer directly after the system prompt
                assert family == "gemma"
                continue
            old, new = (
                _pieces(family, case.chat, case.before_variables),
                _pieces(family, case.after, case.variables),
            )
            system = next((one["content"] for one in case.after if one["role"] == "system"), "")
            if system.strip() not in _spelled(new):  # which the program writes elsewhere
                assert family == "mistral"
                continue
            assert (before.text, after.text) == (_spelled(old), _spelled(new)), case.what
            old += _answered(family, case)
            answer = case.answer + (KINDS[family].marks[-1] if case.ended else "")
            entry = as_tokens([*before.tokens.tolist(), *tokenizer.encode_more(answer)])
            found = _found(tokenizer, before, entry, after)
            if found is None:
                continue
            at = _differs(
                tokenizer, found.index, entry, after.tokens, common(_spelled(old), _spelled(new))
            )
            truth = _at(old, at), _at(new, at)
            said = tuple(
                (side.message, side.role, side.part) for side in (found.previous, found.current)
            )
            assert (found.message, found.role, found.part) == said[1]
            right += said == truth
            if said != truth:
                wrong[case.what] += 1
                examples[case.what] = (
                    f"seed {seed}: {_spelled(old)[at - 20 : at]!r} | "
                    f"{_spelled(old)[at : at + 20]!r} / "
                    f"{_spelled(new)[at : at + 20]!r}\n    said {said}\n    true {truth}"
                )
    total = right + wrong.total()
    print(f"{family}: {right} of {total} places right, {right / total:.1%}")
    told = "\n".join(f"{count} {what}: {examples[what]}" for what, count in wrong.most_common())
    assert total > 50 * CONVERSATIONS
    assert right / total >= WANTED, f"{right} of {total}\n{told}"
