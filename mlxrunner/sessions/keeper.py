"""Keeps a runner's conversation in a store: the text at once, what the entry holds in a thread, while the next turn may run already."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from mlxrunner.errors import ModelError, SessionError
from mlxrunner.models.fingerprint import PARTS, SPELLING, differences, fingerprint, with_format
from mlxrunner.runner import Runner
from mlxrunner.sessions.entry import Packed, StoredEntry, pack
from mlxrunner.sessions.files import Folder
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.store import Sessions
from mlxrunner.terminal import size


class Keeper:
    """`caches`: whether to save more than the text; `kv_bits`: 8 or 4, to store keys and values in so many bits.

    `model`: what the fingerprint is of, a model directory or the parts of one. One thread owns a keeper, that of the runner.
    """

    def __init__(
        self,
        runner: Runner,
        model: Path | Mapping[str, str],
        sessions: Sessions | None = None,
        *,
        caches: bool = True,
        kv_bits: int | None = None,
    ) -> None:
        self.sessions = Sessions() if sessions is None else sessions
        self._runner = weakref.ref(
            runner
        )  # a chat that changes its model gives up the one before at once
        self._caches, self._kv_bits = caches, kv_bits
        self._outline = runner.outline()
        known = fingerprint(model) if isinstance(model, Path) else model
        self._fingerprint = with_format(known, self._outline)
        self._writer: threading.Thread | None = None
        self._failed: str | None = (
            None  # not the error itself: that knows the folder, and would hold it
        )
        self._behind: dict[
            str, list[int]
        ] = {}  # sessions whose caches are newer than their files, and their tokens

    @property
    def runner(self) -> Runner:
        runner = self._runner()
        if runner is None:
            raise ModelError("no model is loaded: /model NAME loads one")
        return runner

    def load(self, name: str) -> tuple[Session, str]:
        """The session, its entry taken over by the runner (and read by the next turn) if it can be, and a line about that.

        Where it was made with another tokenizer or template its text is all that is left. SessionError where the text can't be read.
        """
        session = self.sessions.load(name)
        self.wait()  # what is not written yet is of the entry that is given up now
        different = differences(session.fingerprint, self._fingerprint)
        if any(part in SPELLING for part in different):
            session.forget_tokens()
        strange = session.forget_misspelled(self.runner.tokenizer, self.runner.facts.vocab)
        self.runner.reset()
        return session, self._restore(name) + (
            "; it is tokenized anew: its tokens do not spell its text" if strange else ""
        )

    def _restore(self, name: str) -> str:
        try:
            file = self.sessions.load_cache(name)
            if file is None:
                return "without caches: the first turn evaluates it anew"
            entry = StoredEntry(file)
            if different := differences(entry.fingerprint, self._fingerprint):
                raise SessionError(", ".join(PARTS[part] for part in different))
            if len(entry.tokens) > self.runner.context:
                raise SessionError(
                    f"{len(entry.tokens)} tokens, and the context is {self.runner.context}"
                )
            entry.check(self._outline)
        except SessionError as error:
            return f"its text is kept, its caches are dropped: {error}"
        self.runner.adopt(entry, f"session {name}")
        return f"{len(entry.tokens)} tokens restored ({size(entry.nbytes)})"

    def save(self, name: str, session: Session) -> None:
        """The text is on the disk when this returns; the caches, as far as they are of its tokens, are copied and written in a thread.

        Where the disk is full, the caches give way to the text. SessionError also for the last ones.
        """
        session.fingerprint = dict(self._fingerprint)
        try:
            self.sessions.save(name, session)
        except SessionError as error:
            if not _is_full(error):
                raise
            self._save_in_their_place(name, session)
        tokens = session.history.spelling.tokens
        if not self._caches:
            self.sessions.drop_cache(name)
        elif (writer := self._started()) is not None and writer.is_alive():
            self._behind[name] = (
                tokens  # not two copies at a time: the next save, or `wait`, has the newer ones
            )
        else:
            self._write(name, tokens)
        self._raise()

    def _save_in_their_place(self, name: str, session: Session) -> None:
        """Save the text on a disk that is full: once the caches are not being written any more, or else instead of them."""
        if (writer := self._started()) is not None:
            writer.join()
        try:
            self.sessions.save(name, session)
        except SessionError as error:
            if not _is_full(error) or not self.sessions.nbytes(name)[1]:
                raise
            self.sessions.drop_cache(name)
            self.sessions.save(name, session)

    def wait(self) -> None:
        """Until the caches are on the disk as they were when `save` was last called. SessionError if they could not be written."""
        writer = self._started()
        if writer is not None:
            writer.join()
        if self._behind:
            self._write(*self._behind.popitem())
            self.wait()
        self._raise()

    def _started(self) -> threading.Thread | None:
        """The thread; one that an interrupt kept from being started is forgotten, and with it its hold on the session."""
        if self._writer is not None and self._writer.ident is None:
            self._writer = None
        return self._writer

    def _write(self, name: str, tokens: list[int]) -> None:
        self._behind.pop(name, None)
        runner = self._runner()
        if runner is None:  # and with it what was evaluated
            return
        runner.keep(tokens)  # what was typed and never sent, or taken back, is not saved
        entry = runner.entry
        if not entry.tokens:
            self.sessions.drop_cache(name)
            return
        packed = pack(entry.export(), self._fingerprint, self._kv_bits)
        with self.sessions.lock(name) as held:
            self._writer = threading.Thread(
                target=self._run, args=(name, [packed], held), name="saving a session"
            )
            self._writer.start()

    def _run(self, name: str, packed: list[Packed], held: Folder) -> None:
        """In the thread, which keeps the session locked as long as it writes."""
        try:
            last = packed.pop()  # nobody else holds it
            self.sessions.save_cache(name, last.arrays, last.metadata)
        except SessionError as error:
            self._failed = str(error)

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise SessionError(failed)


def _is_full(error: SessionError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
    )
