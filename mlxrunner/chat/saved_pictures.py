"""The pictures of a saved chat: kept beside its text, and shown again when the chat goes on."""

from __future__ import annotations

from functools import partial

from mlxrunner.chat.commands.table import ChatContext
from mlxrunner.chat.pictures import NAME
from mlxrunner.errors import MlxrunnerError
from mlxrunner.sessions.store import SessionStore
from mlxrunner.terminal.text import count_of


def keep(chat: ChatContext, store: SessionStore, name: str) -> None:
    """Write the pictures that the chat's messages show beside its session `name`.

    Raise SessionError if that fails.
    """
    album = chat.conversation.album
    shown = dict.fromkeys(one for text in _texts(chat) for one in album.named(text))
    store.save_pictures(name, {one: partial(album.png, one) for one in shown})


def bring_back(chat: ChatContext, store: SessionStore, name: str) -> str:
    """Show the pictures of session `name` again, and return what to say of that.

    The model is loaded again if it was loaded without its eyes. Where that fails, or a file is not
    the picture that its name says, the name stays a text.
    """
    named = dict.fromkeys(one for text in _texts(chat) for one in NAME.findall(text))
    album = chat.conversation.album
    try:
        found = store.load_pictures(name, named)
        back = [one for one, content in found.items() if album.bring_back(one, content)]
        if back:
            chat.open_eyes()
    except MlxrunnerError as error:
        return f"; its pictures are not shown: {error}"
    return f"; {count_of(len(back), 'picture')} shown again" if back else ""


def _texts(chat: ChatContext) -> list[str]:
    """Return the messages of the user in all branches."""
    others = [one.history for one in chat.branches.others.values()]
    return [turn.user for history in (chat.conversation.history, *others) for turn in history.turns]
