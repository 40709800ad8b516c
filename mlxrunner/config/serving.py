"""The settings of the server, each described once: for the command line and the config file."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrunner.config.option import check_fields, option
from mlxrunner.options import MOST_TOKENS

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of `mlxrunner serve`. Creating it raises OptionError if one is wrong."""

    host: str = option(
        "127.0.0.1",
        str,
        "Address to listen on. Any but that of this machine itself needs --api-key or --no-key.",
        metavar="ADDRESS",
        shows_default=True,
    )
    port: int = option(
        8080, int, "Port to listen on; 0 = any free one.", low=0, high=65535, shows_default=True
    )
    api_key: str | None = option(
        None,
        str,
        "Refuse requests without this key, which clients send as a bearer token or as x-api-key.",
        metavar="KEY",
    )
    no_key: bool = option(
        False, bool, "Answer anyone who can reach the address, with another one than loopback."
    )
    allow_origin: tuple[str, ...] = option(
        (),
        str,
        "Let pages from URL use the server, such as http://localhost:3000; several times.",
        metavar="URL",
        is_list=True,
        was=("origin",),
    )
    memory: int | None = option(
        None,
        int,
        "Most bytes of all models with what they store. [default: what the device offers]",
        low=1,
        metavar="BYTES",
    )
    slots: int = option(
        8,
        int,
        "Requests that a model answers at a time, and conversations that it holds.",
        low=1,
        high=256,
        shows_default=True,
    )
    max_queue: int = option(
        64,
        int,
        "Requests that may wait for a slot; others are told to come later.",
        low=0,
        high=MOST_TOKENS,
        shows_default=True,
    )
    disk_cache_bytes: int = option(
        8 * GIB,
        int,
        "Disk cache size per model, for conversations evicted from memory.",
        low=1,
        metavar="BYTES",
        shows_default=True,
        was=("park_bytes",),
    )
    disk_cache: bool = option(
        True,
        bool,
        "Discard evicted conversations instead of writing them to disk.",
        was=("parks", "park"),
    )
    keep_alive: float | None = option(
        None,
        float,
        "Unload a model when nobody has asked for it this long. [default: when another needs room]",
        low=0,
        metavar="SECONDS",
    )
    pictures: bool = option(
        False,
        bool,
        "Load models that see pictures with their encoders. Such a model answers one request in a "
        "step, and guesses nothing.",
    )
    picture_folder: str | None = option(
        None,
        str,
        "Read pictures that requests name by file: URLs, from this folder only.",
        metavar="FOLDER",
    )
    disable_rewrite: tuple[str, ...] = option(
        (),
        str,
        "Leave a rule out that makes prompts reusable; several times. docs/serve-prefixes.md lists "
        "them.",
        metavar="NAME",
        is_list=True,
        was=("no_rule",),
    )
    claude_names: bool = option(
        True,
        bool,
        "Refuse the names of Anthropic's models, such as claude-haiku-4-5, instead of answering "
        "them with MODEL.",
    )
    drain: float = option(
        10.0,
        float,
        "Time that running requests have to end when the server is stopped.",
        low=0,
        high=3600,
        metavar="SECONDS",
        shows_default=True,
    )

    def __post_init__(self) -> None:
        check_fields(self)
