"""The commands that save, load and switch chats, with their settings and pictures."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlxrunner.chat.commands import SETTABLE
from mlxrunner.chat.conversation import POLICIES, Conversation, UndoState
from mlxrunner.chat.input import NAME, Command
from mlxrunner.chat.repl import Chat
from mlxrunner.config.names import hub_id_of
from mlxrunner.errors import MlxrunnerError, OptionError, SessionError
from mlxrunner.models.resolve import lasting, resolve
from mlxrunner.options import GenerateOptions
from mlxrunner.pictures.table import Picture
from mlxrunner.sessions.caches import Saver
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import (
    SessionStore,
    drop_oldest,
    is_unnamed,
    must_be_free,
    new_name,
    unnamed_chats,
)
from mlxrunner.terminal.control import Keyboard, is_terminal
from mlxrunner.terminal.output import count_of, visible


@dataclass(frozen=True)
class _Saved:
    """A session as this chat last saved or loaded it."""

    content: str
    """The JSON of the session."""
    branches: Mapping[str, Branch] = field(default_factory=dict)
    """The branches of the session, by name."""
    saved_at: float = 0.0
    """The time of the save in seconds since 1970, or 0 before the first one."""

    @classmethod
    def of(cls, session: Session, saved_at: float) -> _Saved:
        return cls(session.to_json(), dict(session.branches), saved_at)

    def dropped(self, chat: Chat, now: Session) -> list[tuple[str, Branch]]:
        """Return the saved branches, with their names, whose turns no branch of `now` has.

        Branches that the user has dropped are left out.
        """
        others = [*now.branches.values(), *chat.branches.given_up]
        return [
            (name, branch)
            for name, branch in self.branches.items()
            if not any(branch.history.is_within(other.history) for other in others)
        ]


class Saving:
    """Saves and loads a chat. One that has no session is kept without a name."""

    def __init__(
        self,
        store: SessionStore | None = None,
        *,
        caches: bool = True,
        kv_bits: int | None = None,
        keeps_unnamed: bool = False,
    ) -> None:
        """Save into `store`, by default the user's.

        `caches` and `kv_bits` are those of `Saver`. `keeps_unnamed` keeps the text of a chat that
        has no session. Raise OptionError if `kv_bits` is not 4, 8 or
        None.
        """
        if kv_bits not in (None, 4, 8):
            raise OptionError(f"session_kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
        self.store = store or SessionStore()
        self._caches, self._kv_bits = caches, kv_bits
        self.name: str | None = None
        """Name of the session that the chat is saved to after each turn, or None."""
        self._unnamed: str | None = None
        """Name under which a chat without a session is kept, once it has a turn."""
        self._keeps_unnamed = keeps_unnamed
        self._lock = ExitStack()
        self._runner_saver: Saver | None = None
        self._saved: dict[str, _Saved] = {}
        self.commands = (
            Command(
                "/save",
                "[-f] NAME",
                "save as session NAME; -f: overwrite another one",
                self._save,
                self._names,
                is_daily=True,
            ),
            Command(
                "/load",
                "[-f] NAME",
                "load session NAME; -f: discard unsaved turns",
                self._load,
                self._names,
                is_daily=True,
            ),
        )

    @contextmanager
    def opened(self, name: str | None, *, goes_on: bool = False) -> Iterator[Session | None]:
        """Lock the session `name`, and yield what was saved of it, or None.

        `goes_on` takes the last chat without a name instead. The lock lasts until this ends, or
        until /load goes over to another session and locks that one.
        """
        with self._lock:
            found = None
            if name is not None:
                must_be_free(self.store, name)
                self._lock.enter_context(self.store.lock(name))
                self._keep_as(name)
            elif goes_on:
                self._keep_as(self._lock_last())
            if (kept := self.kept_as) is not None and self.store.exists(kept):
                found = self.store.load(kept)
            try:
                yield found
            except BaseException:
                with suppress(SessionError):  # it would hide the other error
                    self._wait()
                raise
            self._wait()

    @property
    def kept_as(self) -> str | None:
        """The name under which the chat is saved, or None if it is not saved yet."""
        return self.name or self._unnamed

    def _keep_as(self, name: str) -> None:
        self.name, self._unnamed = (None, name) if is_unnamed(name) else (name, None)

    def _lock_last(self) -> str:
        """Lock the last chat without a name that no other chat has open, and return its name."""
        kept = unnamed_chats(self.store)
        for name in kept:
            with suppress(SessionError):  # it is open
                self._lock.enter_context(self.store.lock(name))
                return name
        if kept:
            raise SessionError(
                f"no unnamed chat is free: {kept[0]} is open in another chat"
                + (f", and so are the {len(kept) - 1} others" if len(kept) > 2 else "")
                + (f", and so is {kept[1]}" if len(kept) == 2 else "")
                + "; leave it there, or begin a new chat without --continue"
            )
        raise SessionError(
            "there is no unnamed chat to continue: a chat in a terminal is saved after its "
            "first answer, unless --no-save; `mlxrunner sessions list` lists all"
        )

    def begin(self, chat: Chat, resumed: bool) -> None:
        """Restore the open session in the chat, if it is `resumed`, and save it after each turn."""
        self._watch_runner(chat)
        chat.after_load.append(self._watch_runner)
        if resumed and self.kept_as is not None:
            chat.say(self._resume(chat, self.kept_as, settings=False))
            chat.recall()
        elif self.name is not None:
            chat.say(f"session {self.name}: new")
            self._saved[self.name] = _Saved.of(self._session(chat), 0.0)
        chat.after_turn.append(self._after_turn)
        chat.while_idle.append(self._write_behind)
        chat.after_command.append(self._after_command)

    def end(self, chat: Chat) -> None:
        """Save what has changed since the last turn."""
        if self.name is not None:
            with self._naming_safe_turns(chat, self.name):
                if self._session(chat).to_json() != self._saved[self.name].content:
                    self._store(chat, self.name)
                self._wait()
        elif self._unnamed is not None and chat.conversation.history.turns:
            self._store_unnamed(chat)

    def say_how_to_continue(self, chat: Chat) -> None:
        """Say that the conversation is kept, and which command continues it."""
        now = self._session(chat).to_json()
        same = (name for name, saved in self._saved.items() if saved.content == now)
        name = self.name or next((one for one in same if one != self._unnamed), None)
        if not chat.conversation.history.turns or (name is None and self.kept_as is None):
            return
        how = "--continue" if name is None else f"--session {shlex.quote(name)}"
        chat.say(f"the conversation is kept: mlxrunner chat {how}")

    def _wait(self) -> None:
        """Wait until all caches are written."""
        if self._runner_saver is not None:
            self._runner_saver.wait()

    def _write_behind(self) -> bool:
        """Begin to write caches for which the last save had no thread. Return True if it did."""
        with suppress(SessionError):  # the next save says it
            return self._runner_saver is not None and self._runner_saver.write_behind()
        return False

    def _after_turn(self, chat: Chat) -> None:
        if self.name is not None:
            with self._naming_safe_turns(chat, self.name):
                self._store(chat, self.name)
        elif self._keeps_unnamed:
            self._store_unnamed(chat)

    def _store_unnamed(self, chat: Chat) -> None:
        """Save the text of a chat that has no session. If that fails, say so, and keep it no more.

        The chat gets its name, and its folder, with the first turn.
        """
        try:
            is_new = self._unnamed is None
            name = self._unnamed or new_name()
            if is_new:
                self._lock.enter_context(self.store.lock(name))
                self._unnamed = name
            self._save_states(chat, name)
            self._saver.save_text(name, self._session(chat))
            keep(chat, self.store, name)
            if is_new:
                drop_oldest(self.store)
        except SessionError as error:
            self._keeps_unnamed, self._unnamed = False, None
            chat.say(f"this chat is not saved from now on: {error}")

    def _save_states(self, chat: Chat, name: str) -> None:
        """Write what commands took away, and what is not there yet, to the disk."""
        for state in chat.undo_history.unsaved():
            saved = Session(
                lasting(chat.model), {state.name: state.branch}, state.name, settings_of(chat)
            )
            self.store.save_state(name, saved)
            chat.undo_history.saved(state)

    @contextmanager
    def _naming_safe_turns(self, chat: Chat, name: str) -> Iterator[None]:
        """Add to an error which turns are on the disk nevertheless."""
        try:
            yield
        except SessionError as error:
            history = chat.conversation.history
            saved = self._saved.get(name, _Saved(""))
            shared = (history.shared_turns(one.history) for one in saved.branches.values())
            safe, turns = max(shared, default=0), len(history.turns)
            which = "all of" if safe == turns else f"the first {safe} of" if safe else "none of"
            raise SessionError(
                f"{error}; on the disk: {which} {count_of(turns, 'turn')}"
            ) from error

    def _after_command(self, chat: Chat) -> None:
        if self.name is not None:
            self._keep_dropped(chat, self.name)
            self._save_states(chat, self.name)

    def _keep_dropped(self, chat: Chat, name: str) -> None:
        """Keep as branches the turns that the next save of the session `name` would drop."""
        saved = self._saved.get(name)
        for branch, dropped in saved.dropped(chat, self._session(chat)) if saved else ():
            kept = chat.branches.keep(branch, dropped)
            turns = count_of(len(dropped.history.turns), "turn")
            chat.say(f"the saved turns are branch {kept} ({turns}): /switch {kept} returns to it")

    def _save(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, self.name)
        must_be_free(self.store, name)
        with self.store.lock(name):
            if not force and self.store.exists(name) and self._is_another(name):
                found = (
                    f"session {name} was changed elsewhere"
                    if name in self._saved
                    else f"session {name} exists already"
                )
                raise OptionError(f"{found}: /save -f {name} overwrites it")
            with self._naming_safe_turns(chat, name):
                self._store(chat, name, force=force)
                self._saver.wait()
        tokens = f", {len(chat.runner.entry.tokens)} tokens" if self._caches else ""
        chat.say(f"saved as {name}: {_turns(chat)}{tokens}")

    def _load(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, None)
        goes_over = self.name not in (None, name)
        if not force and self._unnamed is not None:
            self._store_unnamed(chat)
        kept = self._unnamed
        if not force and not goes_over and kept is None and self._is_unsaved(chat):
            raise OptionError(
                f"the conversation is not saved ({_turns(chat)}): /save NAME saves it, /load "
                f"-f {name} discards it"
            )
        try:
            session = self.store.load(name)  # raise its errors before the present chat is given up
        except SessionError as error:
            if hub_id_of(name) == name:
                raise
            raise SessionError(f"{error}; /model {name} switches models") from error
        with ExitStack() as held:
            if goes_over:
                held.enter_context(self.store.lock(name))
                if not force:
                    self.end(chat)
            self._saver.wait()
            load_with_context(chat, session)
            line = self._resume(chat, name, settings=True)
            if goes_over or self._unnamed is not None:
                self._unnamed = None  # another conversation, which gets a name of its own
                if goes_over:
                    self._keep_as(name)
                self._lock.close()
                self._lock.push(held.pop_all())
        if kept not in (None, name):
            chat.say(f"the chat so far is saved as {kept}: /load {kept} returns to it")
        chat.say(line)
        chat.recall()

    def _resume(self, chat: Chat, name: str, *, settings: bool) -> str:
        """Restore a session in the chat, and return a line about it.

        `settings`: also those that `put_back` restores before a chat begins.
        """
        back, known = bring_back(chat, self.store, self.store.load(name), name)
        session, caches = self._saver.load(name, chat.conversation.tokenizer, known)
        conversation, found = chat.conversation, _checked(session.settings)
        chat.show_thinking = not found["hide_thinking"]
        if settings:
            conversation.system = session.system
            conversation.options, conversation.policy = found["options"], found["history"]
            conversation.keep_thinking = found["keep_thinking"]
            conversation.variables = found["variables"]
        elif conversation.system != session.system:
            session.branches[session.branch] = Branch(
                session.system, session.history.without_tokens()
            )
        conversation.history = session.history
        chat.branches.current = session.branch
        chat.branches.others = {
            branch: one for branch, one in session.branches.items() if branch != session.branch
        }
        self._saved[name] = _Saved.of(self._session(chat), session.saved_at)
        states = self.store.load_states(name)
        chat.undo_history.restart(
            UndoState(one.branch, one.branches[one.branch]) for one in states[::-1]
        )
        changed = sum(one.is_changed for one in states)
        undone = f"; {changed} of its states for /undo changed, too" if changed else ""
        return f"session {name}: {_turns(chat)}, {caches}{_where_turns_are(chat)}{back}{undone}"

    def _store(self, chat: Chat, name: str, *, force: bool = False) -> None:
        """Save the chat. With `force`, keep nothing of what was saved under the name before."""
        if not force:
            self._keep_dropped(chat, name)
        if name == self.name:
            self._save_states(chat, name)
        session = self._session(chat)
        saved = _Saved.of(session, 0.0)
        try:
            self._saver.save(name, session)
            keep(chat, self.store, name)
        finally:
            if session.saved_at:  # the text is on the disk, even if the caches are not
                self._saved[name] = replace(saved, saved_at=session.saved_at)

    def _is_unsaved(self, chat: Chat) -> bool:
        """Return True if the chat has turns that no session has in their present state."""
        session = self._session(chat)
        has_turns = any(branch.history.turns for branch in session.branches.values())
        return has_turns and session.to_json() not in {one.content for one in self._saved.values()}

    def _is_another(self, name: str) -> bool:
        """Return True unless this chat has saved or loaded the session as it is on the disk."""
        with suppress(SessionError):
            saved = self._saved.get(name)
            return saved is None or saved.saved_at != self.store.load(name).saved_at
        return True

    def _session(self, chat: Chat) -> Session:
        """Return the present chat as a session."""
        branches = chat.branches.others | {chat.branches.current: chat.conversation.branch}
        return Session(lasting(chat.model), branches, chat.branches.current, settings_of(chat))

    def _watch_runner(self, chat: Chat) -> None:
        """Save the entry of the runner that was just loaded, from now on.

        Its fingerprint is taken at once, because the files of the model may change later.
        """
        before, folder = self._runner_saver, resolve(chat.model)
        self._runner_saver = Saver(
            chat.runner, folder, self.store, caches=self._caches, kv_bits=self._kv_bits
        )
        if before is not None:
            before.wait()

    @property
    def _saver(self) -> Saver:
        if self._runner_saver is None:
            raise RuntimeError("the chat has not begun")
        return self._runner_saver

    def _names(self, chat: Chat, before: str) -> Iterable[str]:
        return self.store.names()


def _forced(argument: str, default: str | None) -> tuple[bool, str]:
    """Return True and the name if -f is the first word, or else False and the name.

    Raise OptionError unless there is exactly one name. `default` stands for a missing one.
    """
    words = argument.split()
    force = words[:1] == ["-f"]
    names = words[force:] or ([default] if default else [])
    if len(names) != 1:
        raise OptionError("which session? one NAME, without spaces")
    return force, names[0]


def _turns(chat: Chat) -> str:
    return count_of(len(chat.conversation.history.turns), "turn")


def _where_turns_are(chat: Chat) -> str:
    """Return a note that names the longest branch if the present one is empty, or ""."""
    others = {name: len(branch.history.turns) for name, branch in chat.branches.others.items()}
    longest = max(others, key=others.__getitem__, default=None)
    if chat.conversation.history.turns or longest is None or not others[longest]:
        return ""
    turns = count_of(others[longest], "turn")
    return f"; branch {longest} has {turns}: /switch {longest} opens it"


def settings_of(chat: Chat) -> dict[str, Any]:
    """Return the settings that a session keeps beside its text, as JSON values."""
    conversation = chat.conversation
    return {
        "options": dict(conversation.options),
        "hide_thinking": not chat.show_thinking,
        "context": chat.loading.get("context"),
        "history": conversation.policy,
        "keep_thinking": conversation.keep_thinking,
        "variables": conversation.variables,
        "kv_bits": chat.loading.get("kv_bits"),
    }


def put_back(
    session: Session,
    conversation: Conversation,
    loading: dict[str, Any],
    model: str,
    given: set[str],
) -> str:
    """Restore the settings of `session` before a chat begins. Return the name of its model.

    They go into `conversation` and into `loading`, the options of `Runner.load`. `given` names the
    settings that are given now, which stay. `model` is used if `given` has it.
    """
    found = _checked(session.settings)
    conversation.options |= {
        name: value for name, value in found["options"].items() if name not in given
    }
    if "history" not in given:
        conversation.policy = found["history"]
    if "keep_thinking" not in given:
        conversation.keep_thinking = found["keep_thinking"] and conversation.policy == POLICIES[0]
    if "system" not in given:
        conversation.system = session.system
    if "kv_bits" not in given:
        loading["kv_bits"] = found["kv_bits"]
    model = model if "model" in given else session.model
    if "context" not in given and lasting(model) == session.model:
        loading["context"] = found["context"]
    conversation.variables = {**found["variables"], **conversation.variables}
    return model


def must_be_wanted(name: str | None, before: str, model: str, keyboard: Keyboard) -> None:
    """Ask the user before session `name` continues in another model than `before`.

    Raise OptionError if the user does not want that, or if there is no terminal to ask at.
    """
    if lasting(model) == before:
        return
    what = f"session {name} was saved with the model {before}, and -m names {model}"
    if is_terminal():
        question = f"{what}, which evaluates it again. Continue with {model}? [y/N] "
        if keyboard.ask(visible(question)).lower() in ("y", "yes"):
            return
        raise OptionError(
            f"nothing has changed: without -m, session {name} continues with {before}"
        )
    raise OptionError(
        f"{what}: --switch-model continues with {model}, which evaluates it again; without "
        f"-m, {before} continues"
    )


def load_with_context(chat: Chat, session: Session) -> None:
    """Load the model again with the context that a session of it has set.

    If that fails, print why; the context then stays as it is.
    """
    context = _checked(session.settings)["context"]
    if context in (None, chat.loading.get("context")) or session.model != lasting(chat.model):
        return
    try:
        chat.loaded.change(chat.model, context=context)
    except MlxrunnerError as error:
        chat.say(f"its context of {context} tokens is not used: {error}")
    else:
        chat.say(f"loaded again with a context of {context} tokens")


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the saved settings that can be used, because a file may say anything."""
    options, variables = (
        found if isinstance(found := settings.get(name), dict) else {}
        for name in ("options", "variables")
    )
    context, policy, kv_bits = (settings.get(name) for name in ("context", "history", "kv_bits"))
    listed = {name: tuple(one) if isinstance(one, list) else one for name, one in options.items()}
    return {
        "options": {
            name: one for name, one in listed.items() if name in SETTABLE and _is_usable(name, one)
        },
        "keep_thinking": settings.get("keep_thinking") is True,
        "variables": variables if _is_usable("template", variables) else {},
        "history": policy if policy in POLICIES else POLICIES[0],
        "kv_bits": kv_bits if kv_bits in (4, 8) else None,
        "context": context if type(context) is int and 2 <= context < 2**31 else None,
        "hide_thinking": settings.get("hide_thinking") is True,
    }


def _is_usable(name: str, value: Any) -> bool:
    with suppress(OptionError, TypeError):
        GenerateOptions.of(**{name: value})
        return True
    return False


def keep(chat: Chat, store: SessionStore, name: str) -> None:
    """Write the pictures that the chat's messages show beside its session `name`.

    Raise SessionError if that fails.
    """
    album = chat.conversation.album
    histories = [chat.conversation.history, *(one.history for one in chat.branches.others.values())]
    turns = [turn for history in histories for turn in history.turns]
    shown = dict.fromkeys(one for turn in turns for one in album.named(turn.user))
    store.save_pictures(name, {one: partial(album.png, one) for one in shown})


def bring_back(
    chat: Chat, store: SessionStore, session: Session, name: str
) -> tuple[str, dict[bytes, Picture]]:
    """Show the pictures of `session`, saved as `name`, again, before the chat continues with it.

    Return what to say of that, and the pictures as the model knows them, by digest. The model is
    loaded again if it was loaded without its eyes. Where that fails, or a file is not the picture
    that its name says, the name stays a text.
    """
    turns = [turn for branch in session.branches.values() for turn in branch.history.turns]
    named = dict.fromkeys(one for turn in turns for one in NAME.findall(turn.user))
    album = chat.conversation.album
    try:
        found = store.load_pictures(name, named)
        back = [one for one, content in found.items() if album.bring_back(one, content)]
        if not back:
            return "", {}
        chat.loaded.open_eyes()
        prepared = album.prepare(back, chat.conversation.runner.tokenizer)
    except MlxrunnerError as error:
        return f"; its pictures are not shown: {error}", {}
    return (
        f"; {count_of(len(back), 'picture')} shown again",
        {one.picture.digest: one.picture for one in prepared},
    )
