"""Start a coding agent on a server, and write the files with which launchd or systemd run one."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Literal, get_args
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from mlxrunner.errors import LaunchError

NO_KEY = "none"
"""The key that is given to a client where the server asks for none: clients insist on one."""
KEY_VARIABLE = "MLXRUNNER_API_KEY"
"""The variable in which Codex finds the key."""
MOST_ANSWER, PATIENCE_S = 2**20, 10.0
"""Most bytes of the list of models, and seconds to wait for it."""


@dataclass(frozen=True)
class ServerAddress:
    """A server that answers, and the model that the client is to use."""

    url: str
    """Such as `http://127.0.0.1:8080`."""
    model: str
    context: int = 0
    """Tokens of a prompt and its answer; 0 if it is not known."""
    key: str = NO_KEY
    sees: bool = False
    """True if requests may have pictures."""


@dataclass(frozen=True)
class Launch:
    """The program of a client, with what it is given beside the user's own arguments."""

    program: str
    install: str
    """The command that installs the program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    def script(self, more: Sequence[str] = ()) -> str:
        """Return the lines for a shell that do the same."""
        exports = (f"export {name}={shlex.quote(one)}" for name, one in self.environment.items())
        return "\n".join([*exports, shlex.join([self.program, *self.arguments, *more])])


CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    *(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU", "FABLE")),
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""The variables in which Claude Code finds the model of its conversations, of the names that its
subagents and small tasks use, and of its subagents.
"""


def _claude(server: ServerAddress) -> Launch:
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(CLAUDE_MODELS, server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
    return Launch("claude", "npm install -g @anthropic-ai/claude-code", environment)


def _codex(server: ServerAddress) -> Launch:
    settings: dict[str, object] = {
        "model_provider": "mlxrunner",
        "model_providers.mlxrunner.name": "mlxrunner",
        "model_providers.mlxrunner.base_url": f"{server.url}/v1",
        "model_providers.mlxrunner.wire_api": "responses",
        "model_providers.mlxrunner.env_key": KEY_VARIABLE,
        "model": server.model,
    }
    if server.context:
        settings["model_context_window"] = server.context
    words = [w for name, one in settings.items() for w in ("-c", f"{name}={json.dumps(one)}")]
    return Launch("codex", "npm install -g @openai/codex", {KEY_VARIABLE: server.key}, words)


def _opencode(server: ServerAddress) -> Launch:
    model: dict[str, object] = {"name": server.model}
    if server.context:
        model["limit"] = {"context": server.context, "output": server.context // 4}
    if server.sees:  # it sends pictures only if both say so
        model["attachment"] = True
        model["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    config = {
        "provider": {
            "mlxrunner": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlxrunner",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
                "models": {server.model: model},
            }
        },
        "model": f"mlxrunner/{server.model}",
        "small_model": f"mlxrunner/{server.model}",
    }
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return Launch("opencode", "npm install -g opencode-ai", environment)


CLIENTS: Mapping[str, Callable[[ServerAddress], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}
"""The clients that can be launched."""


def find_server(url: str, key: str | None, model: str | None) -> ServerAddress:
    """Ask the server at `url` for its models, and choose `model`, or else its first one.

    Raise LaunchError if nothing answers, if the key is wrong, or if there is no such model.
    """
    given, url = url, url if "://" in url else f"http://{url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        is_address = bool(re.match(r"https?://\S+$", url)) and urlsplit(url).port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise LaunchError(f"--url {given}: it has to be an address such as http://127.0.0.1:8080")
    request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or NO_KEY}"})
    try:
        # Without a proxy: the server is on this machine.
        opener = build_opener(ProxyHandler({}))
        with opener.open(request, timeout=PATIENCE_S) as answer:  # opens: an address
            found = json.loads(answer.read(MOST_ANSWER))
        models = {str(one["id"]): one for one in found["data"]}
    except HTTPError as error:
        hint = "; give its key with --api-key" if error.code in (401, 403) else ""
        raise LaunchError(f"the server at {url} answers with status {error.code}{hint}") from error
    except (URLError, OSError) as error:
        raise LaunchError(
            f"nothing answers at {url}: start a server in another terminal: mlxrunner serve MODEL"
        ) from error
    except (HTTPException, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{url} is not an mlxrunner server: its list of models can't be read"
        ) from error
    if not models:
        raise LaunchError(f"the server at {url} has no model: start it with one")
    if model is not None and model not in models:
        known = ", ".join(sorted(models))
        raise LaunchError(f"the server at {url} has no model {model!r:.80}, only {known:.400}")
    name = next(iter(models)) if model is None else model
    context = models[name].get("context_length")
    sees = "image" in (models[name].get("input_modalities") or ())
    return ServerAddress(url, name, context if isinstance(context, int) else 0, key or NO_KEY, sees)


UnitKind = Literal["launchd", "systemd"]
UNITS: tuple[UnitKind, ...] = get_args(UnitKind)
LABEL = "mlxrunner.server"
CARRIED = (
    *("LD_PRELOAD", "OPENBLAS_NUM_THREADS", "MLXRUNNER_OPENBLAS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *("MLXRUNNER_CONFIG", "MLXRUNNER_MODEL", "MLXRUNNER_EVENTS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Variables that decide how a server runs; no secrets, which others could read in the file."""
_SYSTEMD = """\
# ~/.config/systemd/user/mlxrunner.service; then: systemctl --user enable --now mlxrunner
{notes}[Unit]
Description=mlxrunner serve: language models for the programs on this machine

[Service]
WorkingDirectory={folder}
{environment}ExecStart={command}
Restart=on-failure
TimeoutStopSec={stop}

[Install]
WantedBy=default.target
"""


def unit(
    kind: UnitKind,
    command: Sequence[str],
    folder: Path,
    *,
    drain: float,
    environment: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """Return the file for `kind` that runs `command` in `folder`.

    `drain`: the seconds that running requests have to end; parking takes some more.
    `environment`: that of this process. The file gets what of it is in `CARRIED`.
    `notes`: lines of text for the reader of the file.
    """
    stop = int(drain) + 30
    carried = {name: environment[name] for name in CARRIED if name in environment}
    if kind == "systemd":  # where % and $ stand for something
        return _SYSTEMD.format(
            notes="".join(f"# {note}\n" for note in notes),
            command=shlex.join(one.replace("%", "%%").replace("$", "$$") for one in command),
            folder=str(folder).replace("%", "%%"),
            stop=stop,
            environment="".join(f"Environment={_assigned(*one)}\n" for one in carried.items()),
        )
    found = plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            **({"EnvironmentVariables": carried} if carried else {}),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": stop,
            "StandardErrorPath": str(Path.home() / "Library" / "Logs" / f"{LABEL}.log"),
        },
        sort_keys=False,
    ).decode()
    place = f"~/Library/LaunchAgents/{LABEL}.plist"
    comments = (f"{place}; then: launchctl load {place}", *notes)
    how = "\n".join(f"<!-- {comment} -->" for comment in comments)
    head, _, rest = found.partition("\n")
    return f"{head}\n{how}\n{rest}"


def _assigned(name: str, value: str) -> str:
    """Return a variable as systemd reads it in `Environment=`."""
    for one, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("\n", "\\n")):
        value = value.replace(one, instead)
    return f'"{name}={value}"'
