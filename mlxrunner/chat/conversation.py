"""A conversation whose history is the evaluated tokens, so that a turn adds only its own.

The history never changes. Each operation replaces it in one assignment, so that an interrupt leaves
either the old one or the new one. This knows nothing about terminals.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, cast

from mlxrunner.cache.entry import FIRST_OF_PICTURES, Shift, as_tokens, common_prefix, words
from mlxrunner.chat.input import Album
from mlxrunner.config.option import MODEL, Settings, values
from mlxrunner.engine.request import Progress
from mlxrunner.engine.scheduling.pacing import Pace
from mlxrunner.errors import OptionError
from mlxrunner.options import CHOOSING, sampling
from mlxrunner.results import Chunk, Usage
from mlxrunner.runner import Runner
from mlxrunner.sessions.session import MAIN, Branch, History, Rendering, SessionTurn
from mlxrunner.templates.messages import PlainMessage, common, has_thinking, opens_thinking
from mlxrunner.terminal.output import count_of
from mlxrunner.tokenizer import Tokenizer, encode_after
from mlxrunner.tokenizer.base import AnswerTokens
from mlxrunner.tokenizer.prompt import TokenizedPrompt, sees, system_tokens

UNSTABLE = 4
"""Number of tokens at the end of a draft that the next key may change."""


@dataclass(frozen=True)
class Outlook:
    """The tokens of a prompt that the entry could provide now."""

    tokens: int
    """Tokens of the prompt."""
    cached: int
    """Tokens of the prompt that the entry can provide."""

    def __str__(self) -> str:
        return (
            f"{self.cached} of {self.tokens} tokens reused, {self.tokens - self.cached} to evaluate"
        )


@dataclass
class Conversation:
    """A runner, the turns that it has answered, and the options for the next answer."""

    runner: Runner
    system: str | None = None
    """The system prompt, or None."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `Runner.generate` that the user has set; `overflow` is "shift" otherwise."""
    policy: Policy = "exact"
    """The policy of the renderer: see `Renderer.policy`."""
    keep_thinking: bool = False
    """Keep thinking in the history even if the template leaves it out."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    piece_s: float | None = None
    """Seconds that a piece of a prefill may take, so that Ctrl-C acts soon; None: any time."""
    usual: Settings = field(default_factory=dict)
    """Options that hold where the user has set none, with their sources."""
    history: History = field(default_factory=History)
    album: Album = field(default_factory=Album)
    """The pictures that messages may name."""
    usages: list[Usage] = field(default_factory=list)
    """The usage of each answer."""
    asked: Rendering = field(default_factory=Rendering)
    """The rendering that the last answer continues."""
    _drift: tuple[Rendering, TemplateDrift] | None = field(default=None, repr=False)
    """The last result of `drift`, with the rendering that it is about."""

    @property
    def messages(self) -> list[PlainMessage]:
        """The messages of all turns, without the system prompt."""
        return self.history.all_messages

    @property
    def effective(self) -> dict[str, Any]:
        """The options for the next answer."""
        return values(self.usual) | self.options

    @property
    def sampling(self) -> str:
        """A few words on how tokens are chosen, and on the model if it is the one who says so."""
        text, chosen = sampling(self.effective), self.effective.keys() & set(CHOOSING)
        suggested = {name for name, setting in self.usual.items() if setting.source == MODEL}
        is_models = bool(chosen) and chosen <= suggested - self.options.keys()
        return f"{text}, as the model suggests" if is_models else text

    @property
    def sees(self) -> bool:
        """True if the model sees pictures."""
        return sees(self.runner.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which knows the pictures if the model sees any."""
        own = self.runner.tokenizer
        return self.album.tokenizer(own) if self.sees else own

    @property
    def renderer(self) -> Renderer:
        """A renderer with the present settings."""
        return Renderer(
            self.tokenizer, self.system, self.policy, self.keep_thinking, self.variables
        )

    @property
    def branch(self) -> Branch:
        """The system prompt and the history."""
        return Branch(self.system, self.history)

    def switch_to(self, branch: Branch) -> None:
        """Continue another branch."""
        self.system, self.history = branch.system, branch.history

    def clear(self) -> None:
        """Forget the turns. The system prompt stays, and so do its tokens in the entry."""
        self.history = History()

    def set_system(self, system: str | None) -> None:
        """Set the system prompt. The turns stay as texts, because all of them follow it.

        Raise PromptError, and change nothing, if the template has no place for it.
        """
        if system != self.system:
            history = self.history.without_tokens()
            replace(self.renderer, system=system).render_draft(history, "")
            self.switch_to(Branch(system, history))

    def set_policy(self, policy: Policy) -> None:
        """Set the policy of the renderer, and bring the last answer into the form that it wants."""
        self.policy = policy
        self.history = self.renderer.settled(self.history)

    def undo(self, turns: int = 1) -> tuple[SessionTurn, ...]:
        """Take back the last `turns` turns and return them.

        The entry keeps their tokens until something else is evaluated.
        """
        history, count = self.history, max(len(self.history.turns) - turns, 0)
        self.history = history.cut(count)
        return history.turns[count:]

    def answer_with(self, number: int, answer: str) -> None:
        """Replace the answer of turn `number` (from 0), and drop the turns after it."""
        self.history = self.renderer.with_answer(self.history, number, answer)

    def outlook(self, text: str | None = None, after: History | None = None) -> Outlook:
        """Return how much a prompt would reuse now, if it sends `text` after the history `after`.

        `after` is by default the present history. Without a `text` the prompt is the conversation
        so far.
        """
        renderer, history = self.renderer, self.history if after is None else after
        rendering = (
            renderer.render_draft(history, "") if text is None else renderer.render(history, text)
        )
        entry, tokens = self.runner.entry, as_tokens(rendering.tokens)
        matched = common_prefix(entry.tokens.array, tokens)
        return Outlook(len(tokens), entry.reach(min(matched, len(tokens) - (text is not None)))[0])

    def drift(self) -> TemplateDrift | None:
        """Compare the evaluated tokens with those that the template would make.

        Return None if nothing is evaluated yet, or if a full context has dropped a part.
        """
        history = self.history
        if not history.rendering.text or history.dropped or history.first:
            return None
        if self._drift is None or self._drift[0] is not history.rendering:
            self._drift = (history.rendering, self.renderer.drift(history))
        return self._drift[1]

    def evaluate(
        self, draft: str, cancelled: Callable[[], bool], after: History | None = None
    ) -> None:
        """Evaluate the known part of the next prompt: the conversation and the text typed so far.

        `after` stands in for the history, as in `send`. `cancelled` is called between small chunks;
        the evaluation ends once it returns True.
        """
        history = self.history if after is None else after
        rendering = self.renderer.render_draft(history, draft)
        tokens = rendering.tokens
        if draft:
            tokens = tokens[:-UNSTABLE]
            while tokens and tokens[-1] >= FIRST_OF_PICTURES:  # not a part of a picture
                tokens = tokens[:-1]
        if len(tokens) < self.runner.context:
            views = self._views(rendering)
            prompt = TokenizedPrompt(
                as_tokens(tokens),
                pictures=len(views),
                views=views,
                is_shifted=history.dropped > 0,
            )
            self.runner.evaluate(prompt, cancelled=cancelled)

    def send(
        self,
        text: str,
        progress: Progress | None = None,
        after: History | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Yield the answer to `text`, which follows `after`, by default the present history.

        `options` take precedence over the conversation's own. Closing the iterator, or an
        interrupt, keeps the answer so far. If there is no answer at all (an error, an interrupted
        prefill), the history stays as it was. Errors are those of `Runner.generate`.
        """
        began = time.perf_counter()
        options = self.effective | options
        history = self.history if after is None else after
        rendering = self.renderer.render(history, text)
        prompt = self._prompt(history, text, rendering, began)
        keep = 0
        if options.get("overflow", "stop" if self.sees else "shift") == "shift":
            given, tokenizer = options.get("keep"), self.runner.tokenizer
            keep = system_tokens(tokenizer, prompt, self.runner.context) if given is None else given
            options |= {"overflow": "shift", "keep": keep}
            if len(prompt.tokens) >= self.runner.context:
                shift = Shift(self.runner.context, keep)
                history, rendering = self._without_oldest(history, text, rendering, shift)
                prompt = self._prompt(history, text, rendering, began)
                if len(tokenizer.encode_more(text)) >= shift.target_free:
                    # After a shift the context would begin in the middle of this turn.
                    keep = 0
                    options |= {"overflow": "stop", "keep": given}
        if self.piece_s is not None and self.runner.pace is None:
            self.runner.pace = Pace(self.piece_s)
        chunks = self.runner.generate(prompt, progress=progress, **options)
        self.asked = rendering
        return self._answer(history, text, rendering, keep, chunks)

    def _prompt(
        self, history: History, text: str, rendering: Rendering, began: float
    ) -> TokenizedPrompt:
        asked: PlainMessage = {"role": "user", "content": text}
        views = self._views(rendering)
        return TokenizedPrompt(
            as_tokens(rendering.tokens),
            "messages",
            [*history.messages(self.system), asked],
            rendering.text,
            self.variables,
            time.perf_counter() - began,
            pictures=len(views),
            views=views,
            is_shifted=history.dropped > 0,
        )

    def _views(self, rendering: Rendering) -> list[Any]:
        """Return what a request has to hold of the pictures of a rendering."""
        if not self.sees:
            return []
        tokenizer = cast(Any, self.runner.tokenizer)
        return [tokenizer.sight.prepare(one) for one in self.album.shown(rendering.text)]

    def _without_oldest(
        self, history: History, text: str, rendering: Rendering, shift: Shift
    ) -> tuple[History, Rendering]:
        """Leave the oldest turns out of the rendering, so that the next turns have room.

        If the evaluated tokens can be continued, nothing is left out: the runner makes room itself.
        """
        evaluated = history.rendering.text
        if self.policy == "exact" and evaluated and rendering.text.startswith(evaluated):
            return history, rendering
        most = self.runner.context - shift.target_free
        while len(rendering.tokens) > most and history.first < len(history.turns):
            history = replace(history, first=history.first + 1)
            rendering = self.renderer.render(history, text)
        return history, rendering

    def _answer(
        self, history: History, user: str, asked: Rendering, keep: int, chunks: Iterator[Chunk]
    ) -> Iterator[Chunk]:
        shown: list[Chunk] = []
        try:
            for chunk in chunks:
                shown.append(chunk)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            if any(chunk.text for chunk in shown) or (shown and shown[-1].finish_reason):
                if self.runner.usage is not None:
                    self.usages.append(self.runner.usage)
                turn, rendering = self._turn(user, asked, shown)
                answered = history.with_turn(turn, rendering)
                self.history = answered.without_range(keep, self.runner.shifted_tokens)
                self.history = self.renderer.settled(self.history)

    def _turn(
        self, user: str, asked: Rendering, shown: list[Chunk]
    ) -> tuple[SessionTurn, Rendering]:
        """Return the turn, and the rendering up to its end.

        The rendering has the tokens whose text was shown.
        """
        before = words(as_tokens(asked.tokens[-8:])).tolist()
        answer = AnswerTokens.of(shown, self.runner.tokenizer, before)
        tokens = answer.tokens.tolist()
        if answer.closing_token is not None:
            tokens.append(answer.closing_token)
        text = "".join(chunk.text for chunk in shown)
        turn = SessionTurn(user, text, asked.end, closing=answer.closing)
        return turn, asked.and_then(answer.text + answer.closing, tokens)


MOST = 50
"""Most states that a chat keeps in memory."""


@dataclass(frozen=True)
class UndoState:
    """A branch as it was before a command."""

    name: str
    branch: Branch

    def is_lost_in(self, present: Branch | None) -> bool:
        """Return True if `present` lacks turns or the system prompt of this state."""
        if present is None:
            return bool(self.branch.history.turns)
        is_without = not self.branch.history.is_within(present.history)
        return is_without or present.system != self.branch.system


@dataclass
class UndoHistory:
    """The states that commands have replaced, the newest last."""

    _states: list[UndoState] = field(default_factory=list)
    _unsaved: list[UndoState] = field(default_factory=list)

    def push(self, state: UndoState) -> None:
        """Keep a state before a command runs, so that no interrupt can lose it."""
        self._states = [*self._states, state][-MOST:]
        self._unsaved = [*self._unsaved, state][-MOST:]

    def settle(self, state: UndoState, branches: Mapping[str, Branch]) -> None:
        """Forget `state` after the command if nothing of it is lost in `branches`."""
        if not state.is_lost_in(branches.get(state.name)):
            self._forget(state)

    def pop(self, name: str, present: Branch) -> Branch | None:
        """Take the newest state of the branch `name` that differs from `present`, or None."""
        while own := [one for one in self._states if one.name == name]:
            self._forget(own[-1])
            if own[-1].is_lost_in(present):
                return own[-1].branch
        return None

    def _forget(self, state: UndoState) -> None:
        self._states = [one for one in self._states if one is not state]
        self._unsaved = [one for one in self._unsaved if one is not state]

    def unsaved(self) -> list[UndoState]:
        """Return the states that are not on the disk yet, the newest last."""
        return self._unsaved

    def saved(self, state: UndoState) -> None:
        """Note that `state` is on the disk."""
        self._unsaved = [one for one in self._unsaved if one is not state]

    def restart(self, states: Iterable[UndoState] = ()) -> None:
        """Begin again with the saved states of another conversation, the newest last."""
        self._states, self._unsaved = list(states), []


@dataclass
class Branches:
    """The names of all branches, and every branch but the present one, which the chat holds."""

    current: str = MAIN
    """The name of the present branch."""
    others: dict[str, Branch] = field(default_factory=dict)
    """The other branches, by name."""
    given_up: list[Branch] = field(default_factory=list)
    """The branches that the user has dropped."""

    def __iter__(self) -> Iterator[str]:
        yield from sorted([self.current, *self.others])

    def fork(self, name: str, present: Branch) -> None:
        """Continue under another name, and leave the branch `present` as it is.

        Raise OptionError if the name is taken or not one word.
        """
        if not name or name.split() != [name]:
            raise OptionError(f"{name!r} can't be the name of a branch: use one word")
        if name in self:
            raise OptionError(f"branch {name} exists already: /switch {name} opens it")
        self.others[self.current] = present
        self.current = name

    def switch(self, name: str, present: Branch) -> Branch:
        """Leave the branch `present`, and return the branch to continue.

        Raise OptionError if no branch has this name.
        """
        if name == self.current:
            return present
        self._check(name)
        self.others[self.current] = present
        self.current = name
        return self.others.pop(name)

    def keep(self, name: str, branch: Branch) -> str:
        """Keep an earlier state of branch `name`. Return its new name, such as `main~1`."""
        base = re.sub(r"~\d+$", "", name)
        free = next(f"{base}~{number}" for number in count(1) if f"{base}~{number}" not in self)
        self.others[free] = branch
        return free

    def drop_kept_within(self, branch: Branch) -> None:
        """Drop the branches whose names `keep` has made and whose turns `branch` has again."""
        for name, one in [*self.others.items()]:
            if not re.search(r"~\d+$", name):
                continue
            if one.system == branch.system and one.history.is_within(branch.history):
                del self.others[name]

    def drop(self, name: str) -> Branch:
        """Drop a branch and return it. Raise OptionError if it is the present one or unknown."""
        if name == self.current:
            raise OptionError(f"branch {name} is in use: /switch to another one first")
        self._check(name)
        self.given_up.append(self.others.pop(name))
        return self.given_up[-1]

    def forget_tokens(self) -> None:
        """Keep the other branches as texts only, for another model."""
        self.others = {
            name: replace(branch, history=branch.history.without_tokens())
            for name, branch in self.others.items()
        }

    def _check(self, name: str) -> None:
        if name not in self.others:
            are = "are" if self.others else "is only"
            raise OptionError(f"there is no branch {name!r}: there {are} {', '.join(self)}")


def full_context(
    conversation: Conversation, first: int, last: Chunk, options: dict[str, Any]
) -> Iterator[str]:
    """Yield a line for each thing that a full context, or a limit, has cut off from a turn.

    `first` is the first turn that was in the prompt before, and `last` the last chunk of the
    answer. `options` are those of this answer alone.
    """
    usage = last.usage
    if usage is None:
        return
    context = conversation.runner.context
    dropped = usage.cache.shifted_tokens
    left_out = conversation.history.first - first
    if dropped or left_out > 0:
        what = count_of(dropped, "token") if dropped else count_of(left_out, "turn")
        were = "was" if (dropped or left_out) == 1 else "were"
        yield (
            f"(the context of {context} tokens was full: the oldest {what} {were} dropped, and the "
            f"model does not see {'it' if were == 'was' else 'them'} any more; "
            f"{more_room(conversation)})"
        )
    if last.finish_reason == "length":
        most = (conversation.effective | options).get("max_tokens")
        if most is not None and usage.completion_tokens >= most:
            yield (
                f"(stopped at max_tokens {most}: /set max_tokens {2 * most} allows more, "
                f"/retry max_tokens={2 * most} answers again)"
            )
        else:
            yield (
                f"(stopped at the end of the context of {context} tokens: "
                f"{more_room(conversation)})"
            )


def more_room(conversation: Conversation) -> str:
    """Return the commands that make room in a full context."""
    runner = conversation.runner
    longer = f"/set context {min(2 * runner.context, runner.facts.context)} makes it longer, "
    is_longest = runner.context >= runner.facts.context
    return f"{'' if is_longest else longer}/undo removes turns, /clear all of them"


Policy = Literal["exact", "template"]
POLICIES: tuple[Policy, ...] = ("exact", "template")
UNKNOWN = "\ue0f0\ue0f1"
"""Stands for a text that is not known yet: private characters, which no template changes."""
DRIFTS = {
    "none": "none",
    "retokenized": "different tokens of the same text",
    "whitespace": "different white space",
    "thinking": "thinking that the template drops",
    "text": "different text",
}


@dataclass(frozen=True)
class TemplateDrift:
    """The difference between the evaluated tokens and those that the template would make."""

    kind: Literal["none", "retokenized", "whitespace", "thinking", "text"]
    """The kind of the difference: a key of `DRIFTS`."""
    at: int
    """Number of tokens at the beginning that are equal in both."""
    evaluated: int
    """Number of tokens evaluated."""
    template: int
    """Number of tokens that the template makes."""

    def __str__(self) -> str:
        if self.kind == "none":
            return DRIFTS[self.kind]
        return (
            f"{DRIFTS[self.kind]}, after {self.at} tokens: {self.evaluated - self.at} were "
            f"evaluated, the template has {self.template - self.at}"
        )


@dataclass(frozen=True)
class Renderer:
    """Renders the histories of one conversation."""

    tokenizer: Tokenizer
    system: str | None = None
    """The system prompt, or None."""
    policy: Policy = "exact"
    """"exact" keeps the evaluated tokens; "template" renders the whole conversation again."""
    keep_thinking: bool = False
    """Keep thinking in the history even if the template leaves it out."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""

    def render(self, history: History, user: str) -> Rendering:
        """Return the rendering up to the beginning of the answer to `user`."""
        return self._continued(history, user, self._text(history, user), cut="")

    def render_draft(self, history: History, text: str) -> Rendering:
        """Return the part of the rendering that stays the same when more is typed after `text`."""
        user = text + UNKNOWN
        return self._continued(history, user, self._text(history, user), cut=UNKNOWN)

    def settled(self, history: History, *, is_edited: bool = False) -> History:
        """Return the history with its last answer rendered as the next turn needs it.

        That differs from the evaluated tokens if the template leaves out the thinking, or if the
        user has edited the answer.
        """
        if self.policy != "exact" or self.keep_thinking or not history.turns:
            return history
        turn = history.turns[-1]
        before = history.rendering.text[: turn.begins.characters] if turn.begins else ""
        if not (is_edited or has_thinking(turn.answer) or opens_thinking(before)):
            return history
        seen, text = _before(self._text(history, UNKNOWN), UNKNOWN), history.rendering.text
        if seen.startswith(text):
            return history
        position = history.last_position(common(seen, text))
        if position is None:
            rendering = Rendering(seen, tuple(self.tokenizer.encode(seen)))
        else:
            kept = history.rendering.up_to(position)
            rendering = self._extended(kept, seen[position.characters :])
        closing = _before(self._after_last_answer(history, UNKNOWN) or "", UNKNOWN)
        return history.rerendered(position, rendering, closing)

    def asked(self, history: History, number: int) -> Rendering:
        """Return the rendering that the answer of turn `number` (from 0) continues.

        If its tokens are no longer known, it is rendered as it would be now.
        """
        turn = history.turns[number]
        if turn.begins is not None:
            return history.rendering.up_to(turn.begins)
        return self.render(history.cut(number), turn.user)

    def with_answer(self, history: History, number: int, answer: str) -> History:
        """Return the history with another answer to turn `number` (from 0).

        The turns after it are dropped.
        """
        turn, asked, before = (
            history.turns[number],
            self.asked(history, number),
            history.cut(number),
        )
        if turn.begins is not None:  # the tokens are kept, and so is this count
            before = replace(before, dropped=history.dropped)
        rendering = self._extended(asked, answer)
        edited = before.with_turn(SessionTurn(turn.user, answer, asked.end), rendering)
        return self.settled(edited, is_edited=True)

    def drift(self, history: History) -> TemplateDrift:
        """Compare the evaluated tokens with those that the template would make.

        Use it only if a full context has dropped nothing.
        """
        evaluated, text = history.rendering.tokens, history.rendering.text
        whole = _before(self._text(history, UNKNOWN), UNKNOWN)
        if whole.startswith(text):
            whole = text  # the text after the last answer is not evaluated yet
        else:
            tail = self._not_evaluated_after_last_answer(history, UNKNOWN) or ""
            whole = whole.removesuffix(_before(tail, UNKNOWN))
        template = tuple(self.tokenizer.encode(whole))
        at = common(evaluated, template)
        kind: Literal["none", "retokenized", "whitespace", "thinking", "text"] = "text"
        if at == len(evaluated) == len(template):
            kind = "none"
        elif whole == text:
            kind = "retokenized"
        elif "".join(whole.split()) == "".join(text.split()):
            kind = "whitespace"
        elif any(has_thinking(turn.answer) for turn in history.turns[history.first :]):
            kind = "thinking"
        return TemplateDrift(kind, at, len(evaluated), len(template))

    def _text(self, history: History, user: str) -> str:
        """Return the template's text of the whole conversation."""
        messages: list[PlainMessage] = [
            *history.messages(self.system),
            {"role": "user", "content": user},
        ]
        return self.tokenizer.render(messages, **self.variables)

    def _continued(self, history: History, user: str, text: str, cut: str) -> Rendering:
        """Return the rendering of `text` up to `cut`, from the history's tokens if possible."""
        whole, evaluated = _before(text, cut), history.rendering
        if self.policy == "exact" and evaluated.text:
            if whole.startswith(evaluated.text):
                return self._extended(evaluated, whole[len(evaluated.text) :])
            tail = self._not_evaluated_after_last_answer(history, user)
            if tail is not None:
                return self._extended(evaluated, _before(tail, cut))
        return Rendering(whole, tuple(self.tokenizer.encode(whole)))

    def _extended(self, rendering: Rendering, text: str) -> Rendering:
        return rendering.and_then(text, encode_after(self.tokenizer, rendering.text, text))

    def _not_evaluated_after_last_answer(self, history: History, user: str) -> str | None:
        """Return `_after_last_answer` without the text of the token that ended the answer."""
        tail = self._after_last_answer(history, user)
        return None if tail is None else tail.removeprefix(history.turns[-1].closing)

    def _after_last_answer(self, history: History, user: str) -> str | None:
        """Return the template's text after the last answer, however it changes that answer.

        Return None if the template leaves the answer out.
        """
        *earlier, last = history.turns
        unknown = replace(history, turns=(*earlier, SessionTurn(last.user, UNKNOWN)))
        _, found, tail = self._text(unknown, user).partition(UNKNOWN)
        return tail if found else None


def _before(text: str, cut: str) -> str:
    return text.partition(cut)[0] if cut else text
