"""A chat that survives: /save and /load, and a session that is saved after each turn. Knows the chat, not the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from mlxrunner.chat.commands import Command
from mlxrunner.chat.repl import Chat
from mlxrunner.errors import OptionError, SessionError
from mlxrunner.models.resolve import lasting, resolve
from mlxrunner.sessions.keeper import Keeper
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.settings import apply, settings_of, with_context
from mlxrunner.sessions.store import Sessions


@dataclass(frozen=True)
class _Kept:
    """A session as this chat has saved or loaded it last: its JSON, its branches, and when that was saved (0: not yet)."""

    content: str
    branches: Mapping[str, Branch] = field(default_factory=dict)
    saved_at: float = 0.0

    @classmethod
    def of(cls, session: Session, saved_at: float) -> _Kept:
        """`session` may be changed afterwards."""
        branches = {
            name: Branch(branch.system, branch.history.copy())
            for name, branch in session.branches.items()
        }
        return cls(session.to_json(), branches, saved_at)

    def dropped(self, chat: Chat, now: Session) -> list[tuple[str, Branch]]:
        """The branches, with their names, whose turns no branch has `now`, but for those that the user has given up."""
        others = [branch.history for branch in now.branches.values()]
        others += [history for _, history in chat.branches.given_up]
        return [
            (name, branch)
            for name, branch in self.branches.items()
            if not any(branch.history.is_within(other) for other in others)
        ]


class Saving:
    """What keeps a chat. `caches`, `kv_bits`: see Keeper.

    `name`: the session that is open, and that the chat is saved to after each turn; None without `--session`.
    """

    def __init__(
        self, sessions: Sessions | None = None, *, caches: bool = True, kv_bits: int | None = None
    ) -> None:
        if kv_bits not in (None, 4, 8):
            raise OptionError(f"session_kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
        self.sessions = sessions or Sessions()
        self._caches, self._kv_bits = caches, kv_bits
        self.name: str | None = None
        self._lock = ExitStack()
        self._keeper: Keeper | None = None
        self._kept: dict[str, _Kept] = {}
        self.commands = (
            Command(
                "/save",
                "[-f] NAME",
                "save the conversation as session NAME; -f overwrites another one",
                self._save,
                self._names,
            ),
            Command(
                "/load",
                "[-f] NAME",
                "go on with session NAME; -f gives up what is not saved",
                self._load,
                self._names,
            ),
        )

    @contextmanager
    def opened(self, name: str | None) -> Iterator[Session | None]:
        """Hold session `name` from here on, whatever it is that the chat is saved to at the end; what was saved of it, if anything was."""
        with self._lock:
            found = None
            if name is not None:
                self._lock.enter_context(self.sessions.lock(name))
                self.name = name
                found = self.sessions.load(name) if self.sessions.exists(name) else None
            try:
                yield found
            except BaseException:
                with suppress(SessionError):  # which would hide the other one
                    self._wait()
                raise
            self._wait()

    def begin(self, chat: Chat, resumed: bool) -> None:
        """Put what was saved of the open session into the chat, and save it after each turn from here on."""
        self._keep(chat)
        chat.after_load.append(self._keep)
        if self.name is not None:
            if resumed:
                chat.say(self._resume(chat, self.name, settings=False))
            else:
                chat.say(f"session {self.name}: a new one")
                self._kept[self.name] = _Kept.of(self._session(chat), 0.0)
        chat.after_turn.append(self._after_turn)
        chat.after_command.append(self._after_command)

    def end(self, chat: Chat) -> None:
        """Save what has been changed since the last turn."""
        if self.name is not None:
            with self._said_what_is_safe(chat, self.name):
                if self._session(chat).to_json() != self._kept[self.name].content:
                    self._store(chat, self.name)
                self._wait()

    def _wait(self) -> None:
        """Wait until all caches are written."""
        if self._keeper is not None:
            self._keeper.wait()

    def _after_turn(self, chat: Chat) -> None:
        if self.name is not None:
            with self._said_what_is_safe(chat, self.name):
                self._store(chat, self.name)

    @contextmanager
    def _said_what_is_safe(self, chat: Chat, name: str) -> Iterator[None]:
        """Say with an error which turns are on the disk all the same."""
        try:
            yield
        except SessionError as error:
            history = chat.conversation.history
            kept = self._kept.get(name, _Kept(""))
            safe, said = (
                max((history.shared(one.history) for one in kept.branches.values()), default=0),
                len(history.turns),
            )
            which = "all of" if safe == said else f"the first {safe} of" if safe else "none of"
            raise SessionError(f"{error}; on the disk: {which} {_count(said)}") from error

    def _after_command(self, chat: Chat) -> None:
        if self.name is not None:
            self._keep_dropped(chat, self.name)

    def _keep_dropped(self, chat: Chat, name: str) -> None:
        """Keep as branches, and say so, what the next save of session `name` would drop of its turns."""
        kept = self._kept.get(name)
        for branch, dropped in kept.dropped(chat, self._session(chat)) if kept else ():
            place = chat.branches.keep(branch, dropped.system, dropped.history.copy())
            turns = _count(len(dropped.history.turns))
            chat.say(
                f"what was saved is kept as branch {place} ({turns}): /switch {place} goes back to it"
            )

    def _save(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, self.name)
        with self.sessions.lock(name):
            if not force and self.sessions.exists(name) and self._is_another(name):
                found = (
                    f"session {name} was changed elsewhere"
                    if name in self._kept
                    else f"there is a session {name} already"
                )
                raise OptionError(f"{found}: /save -f {name} overwrites it")
            with self._said_what_is_safe(chat, name):
                self._store(chat, name, force=force)
                self._keeping.wait()
        tokens = f", {len(chat.runner.entry.tokens)} tokens" if self._caches else ""
        chat.say(f"saved as {name}: {_turns(chat)}{tokens}")

    def _load(self, chat: Chat, argument: str) -> None:
        force, name = _forced(argument, None)
        goes_over = self.name not in (None, name)
        if not force and not goes_over and self._is_unsaved(chat):
            raise OptionError(
                f"what was said is not saved ({_turns(chat)}): /save NAME saves it, /load -f {name} gives it up"
            )
        session = self.sessions.load(name)  # complain before giving anything up
        with ExitStack() as held:
            if goes_over:
                held.enter_context(self.sessions.lock(name))
                if not force:
                    self.end(chat)
            self._keeping.wait()
            with_context(chat, session)
            line = self._resume(chat, name, settings=True)
            if goes_over:
                self.name = name
                self._lock.close()
                self._lock.push(held.pop_all())
        chat.say(line)

    def _resume(self, chat: Chat, name: str, *, settings: bool) -> str:
        """Put what was saved into the chat; a line about it."""
        session, caches = self._keeping.load(name)
        conversation = chat.conversation
        apply(chat, session.settings, begun=settings)
        if settings:
            conversation.system = session.system
        elif conversation.system != session.system:
            session.history.forget_tokens()
        conversation.history = session.history
        chat.branches.current = session.branch
        others = {
            branch: (one.system, one.history)
            for branch, one in session.branches.items()
            if branch != session.branch
        }
        chat.branches.others = others
        self._kept[name] = _Kept.of(self._session(chat), session.saved_at)
        return f"session {name}: {_turns(chat)}, {caches}{_where_turns_are(chat)}"

    def _store(self, chat: Chat, name: str, *, force: bool = False) -> None:
        """Save the chat; `force`: whatever was saved under that name before."""
        if not force:
            self._keep_dropped(chat, name)
        session = self._session(chat)
        kept = _Kept.of(session, 0.0)
        try:
            self._keeping.save(name, session)
        finally:
            if session.saved_at:  # the text is on the disk, whatever became of the caches
                self._kept[name] = replace(kept, saved_at=session.saved_at)

    def _is_unsaved(self, chat: Chat) -> bool:
        """Whether something was said that no session has as it is now."""
        session = self._session(chat)
        said = any(branch.history.turns for branch in session.branches.values())
        return said and session.to_json() not in {kept.content for kept in self._kept.values()}

    def _is_another(self, name: str) -> bool:
        """Whether what is saved under this name is not what this chat has saved or loaded."""
        with suppress(SessionError):
            return (
                name not in self._kept
                or self._kept[name].saved_at != self.sessions.load(name).saved_at
            )
        return True

    def _session(self, chat: Chat) -> Session:
        """The chat as it is now."""
        conversation = chat.conversation
        others = {branch: Branch(*kept) for branch, kept in chat.branches.others.items()}
        present = {chat.branches.current: Branch(conversation.system, conversation.history)}
        return Session(
            lasting(chat.model), others | present, chat.branches.current, settings_of(chat)
        )

    def _keep(self, chat: Chat) -> None:
        """Keep a runner that was just loaded: its files, which may change later, are still those that it was loaded from."""
        before, folder = self._keeper, resolve(chat.model)
        self._keeper = Keeper(
            chat.runner, folder, self.sessions, caches=self._caches, kv_bits=self._kv_bits
        )
        if before is not None:
            before.wait()

    @property
    def _keeping(self) -> Keeper:
        if self._keeper is None:
            raise RuntimeError("the chat has not begun")
        return self._keeper

    def _names(self, chat: Chat) -> Iterable[str]:
        return self.sessions.names()


def _forced(argument: str, default: str | None) -> tuple[bool, str]:
    """Whether -f is there, and the name."""
    words = argument.split()
    force = words[:1] == ["-f"]
    names = words[force:] or ([default] if default else [])
    if len(names) != 1:
        raise OptionError("which session? one NAME, without spaces")
    return force, names[0]


def _turns(chat: Chat) -> str:
    return _count(len(chat.conversation.history.turns))


def _where_turns_are(chat: Chat) -> str:
    """Where the branch that is gone on with is empty: the one with most turns, so that nobody takes them for lost."""
    others = {name: len(history.turns) for name, (_, history) in chat.branches.others.items()}
    longest = max(others, key=others.__getitem__, default=None)
    if chat.conversation.history.turns or longest is None or not others[longest]:
        return ""
    return f"; branch {longest} has {_count(others[longest])}: /switch {longest} goes to it"


def _count(turns: int) -> str:
    return f"{turns} turn{'' if turns == 1 else 's'}"
