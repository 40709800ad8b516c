"""Check where a server is to listen, and listen there. Knows no HTTP and no model."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from mlxrunner.config.names import did_you_mean
from mlxrunner.errors import OptionError
from mlxrunner.options import ServeSettings
from mlxrunner.server.prompts.rules import RULES

WAITING = 128
"""Connections that may wait to be accepted."""


def check_access(settings: ServeSettings) -> None:
    """Raise OptionError if other machines could ask without a key and nobody has said so."""
    if settings.api_key is not None and settings.no_key:
        raise OptionError("--api-key and --no-key contradict each other: use one of them")
    if settings.api_key is not None and not settings.api_key.isascii():
        raise OptionError("--api-key: clients send it in a header: use letters, digits and signs")
    if not (is_loopback(settings.host) or settings.api_key or settings.no_key):
        raise OptionError(
            f"--host {settings.host} lets other machines ask: give --api-key KEY, or --no-key if "
            "anyone who can reach it may use it"
        )


def check_rules(settings: ServeSettings) -> None:
    """Raise OptionError for a rule that there is not."""
    known = [rule.name for rule in RULES]
    for name in settings.disable_rewrite:
        if name not in known:
            raise OptionError(
                f"--disable-rewrite {name}: there is no such rule: {did_you_mean(name, known)}"
                f"there are {', '.join(known)}"
            )


def check_origins(settings: ServeSettings) -> None:
    """Raise OptionError for an origin that no browser has."""
    for origin in settings.allow_origin:
        # Browsers send null, and some programs file://, for pages that are files.
        if not re.fullmatch(r"null|file://|[a-z][a-z0-9+.-]*://[^/?#*\s]+", origin):
            raise OptionError(
                f"--allow-origin {origin}: has to be the beginning of a page's URL, as browsers "
                "send it, such as http://localhost:3000, without * and path; or null or file:// "
                "for files"
            )


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens where the settings say. Raise OptionError if it can't."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"--host {host}: no such address: {error.strerror or error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(WAITING)
    except OSError as error:
        found.close()
        raise OptionError(_why_not(error, host, port)) from error
    return found


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another mlxrunner serve: stop that one, "
            "or choose another --port (0 = any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs an administrator: choose a --port from 1024 on"
    return f"can't listen on port {port} of {host}: {error.strerror or error}"


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    port = listening.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
