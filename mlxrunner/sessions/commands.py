"""A chat that survives: /save and /load, and a session that is saved after each turn. Knows the chat, not the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mlxrunner.chat.commands import Command
from mlxrunner.chat.repl import Chat
from mlxrunner.errors import OptionError
from mlxrunner.models.resolve import DEMO, resolve
from mlxrunner.sessions.keeper import Keeper
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.settings import apply, settings_of
from mlxrunner.sessions.store import Sessions


class Saving:
    """What keeps a chat. `caches`, `kv_bits`: see Keeper.

    `name`: the session that is open, and that the chat is saved to after each turn; None without `--session`.
    """

    def __init__(self, sessions: Sessions | None = None, *, caches: bool = True, kv_bits: int | None = None) -> None:
        if kv_bits not in (None, 4, 8):
            raise OptionError(f"session_kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
        self.sessions = sessions or Sessions()
        self._caches, self._kv_bits = caches, kv_bits
        self.name: str | None = None
        self._lock = ExitStack()
        self._keeper: Keeper | None = None
        self._own: set[str] = set()  # names that this chat may overwrite
        self._kept: dict[str, str] = {}  # by name, what was saved or loaded last
        self._is_unsaved = False
        self.commands = (
            Command(
                "/save", "[-f] NAME", "save the conversation as session NAME; -f overwrites another one", self._save, self._names
            ),
            Command(
                "/load", "[-f] NAME", "go on with session NAME; -f gives up turns that are not saved", self._load, self._names
            ),
        )

    @contextmanager
    def opened(self, name: str | None) -> Iterator[Session | None]:
        """Hold session `name` from here on, whatever it is that the chat is saved to at the end; what was saved of it, if anything was."""
        with self._lock:
            found = None
            if name is not None:
                self._take(name)
                found = self.sessions.load(name) if self.sessions.exists(name) else None
            yield found
            if self._keeper is not None:
                self._keeper.wait()

    def begin(self, chat: Chat, resumed: bool) -> None:
        """Put what was saved of the open session into the chat, and save it after each turn from here on."""
        if self.name is not None:
            if resumed:
                self._resume(chat, self.name, settings=False)
            else:
                chat.say(f"session {self.name}: a new one")
                self._kept[self.name] = self._session(chat).to_json()
        chat.after_turn.append(self._after_turn)

    def end(self, chat: Chat) -> None:
        """Save what has been changed since the last turn."""
        if self.name is not None and self._session(chat).to_json() != self._kept.get(self.name):
            self._store(chat, self.name)

    def _after_turn(self, chat: Chat) -> None:
        if self.name is None:
            self._is_unsaved = True
        else:
            self._store(chat, self.name)

    def _save(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, self.name)
        if name not in self._own and not force and self.sessions.exists(name):
            raise OptionError(f"there is a session {name} already: /save -f {name} overwrites it")
        self._store(chat, name)
        self._own.add(name)
        self._is_unsaved = False
        tokens = f", {len(chat.runner.entry.tokens)} tokens" if self._caches else ""
        chat.say(f"saved as {name}: {_turns(chat)}{tokens}")

    def _load(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, None)
        if self._is_unsaved and not force:
            raise OptionError(f"what was said is not saved ({_turns(chat)}): /save NAME saves it, /load -f {name} gives it up")
        self.sessions.load(name)  # complain before giving anything up
        if self.name is not None and name != self.name:
            self.end(chat)
            self._take(name)
        self._resume(chat, name, settings=True)

    def _resume(self, chat: Chat, name: str, *, settings: bool) -> None:
        session, caches = self._keeping(chat).load(name)
        conversation = chat.conversation
        if settings:
            apply(chat, session.settings)
            conversation.system = session.system
        conversation.history = session.history
        chat.branches.current = session.branch
        others = {branch: (one.system, one.history) for branch, one in session.branches.items() if branch != session.branch}
        chat.branches.others = others
        self._kept[name] = self._session(chat).to_json()
        self._own.add(name)
        self._is_unsaved = False
        chat.say(f"session {name}: {_turns(chat)}, {caches}")

    def _store(self, chat: Chat, name: str) -> None:
        session = self._session(chat)
        self._kept[name] = session.to_json()
        self._keeping(chat).save(name, session)

    def _session(self, chat: Chat) -> Session:
        """The chat as it is now."""
        conversation = chat.conversation
        others = {branch: Branch(*kept) for branch, kept in chat.branches.others.items()}
        present = {chat.branches.current: Branch(conversation.system, conversation.history)}
        return Session(_lasting(chat.model), others | present, chat.branches.current, settings_of(chat))

    def _keeping(self, chat: Chat) -> Keeper:
        """The keeper of the chat's runner, which may have become another one."""
        if self._keeper is None or not self._keeper.is_of(chat.runner):
            if self._keeper is not None:
                self._keeper.wait()
            folder = resolve(chat.model)
            self._keeper = Keeper(chat.runner, folder, self.sessions, caches=self._caches, kv_bits=self._kv_bits)
        return self._keeper

    def _take(self, name: str) -> None:
        """Hold this session, and no other any more."""
        held = ExitStack()
        held.enter_context(self.sessions.lock(name))
        self._lock.close()
        self._lock.push(held)
        self.name = name
        self._own.add(name)

    def _names(self, chat: Chat) -> Iterable[str]:
        return self.sessions.names()


def _lasting(model: str) -> str:
    """A directory by its whole path: the next chat may be begun elsewhere."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if model != DEMO and folder.is_dir() else model


def _forced(argument: str, default: str | None) -> tuple[bool, str]:
    """Whether -f is there, and the name."""
    words = argument.split()
    force = words[:1] == ["-f"]
    names = words[force:] or ([default] if default else [])
    if len(names) != 1:
        raise OptionError("which session? one NAME, without spaces")
    return force, names[0]


def _turns(chat: Chat) -> str:
    count = len(chat.conversation.history.turns)
    return f"{count} turn{'' if count == 1 else 's'}"
