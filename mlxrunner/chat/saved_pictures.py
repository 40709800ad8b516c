"""The pictures of a saved chat: kept beside its text, and shown again when the chat goes on."""

from __future__ import annotations

from functools import partial

from mlxrunner.chat.commands.table import ChatContext
from mlxrunner.chat.pictures import NAME
from mlxrunner.errors import MlxrunnerError
from mlxrunner.pictures.table import Picture
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.terminal.text import count_of


def keep(chat: ChatContext, store: SessionStore, name: str) -> None:
    """Write the pictures that the chat's messages show beside its session `name`.

    Raise SessionError if that fails.
    """
    album = chat.conversation.album
    shown = dict.fromkeys(one for text in _texts(chat) for one in album.named(text))
    store.save_pictures(name, {one: partial(album.png, one) for one in shown})


def bring_back(
    chat: ChatContext, store: SessionStore, session: Session, name: str
) -> tuple[str, dict[bytes, Picture]]:
    """Show the pictures of `session`, saved as `name`, again, before the chat goes on with it.

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
        chat.open_eyes()
        prepared = album.prepare(back, chat.conversation.runner.tokenizer)
    except MlxrunnerError as error:
        return f"; its pictures are not shown: {error}", {}
    return (
        f"; {count_of(len(back), 'picture')} shown again",
        {one.picture.digest: one.picture for one in prepared},
    )


def _texts(chat: ChatContext) -> list[str]:
    """Return the messages of the user in all branches."""
    others = [one.history for one in chat.branches.others.values()]
    return [turn.user for history in (chat.conversation.history, *others) for turn in history.turns]
