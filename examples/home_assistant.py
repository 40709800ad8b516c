"""Turn spoken commands into actions, as a smart home does: python examples/home_assistant.py

Needs `mlxrunner serve MODEL` and the extra `serve`. The state comes last: the rest is reused.
"""

import json
import os
import sys
from urllib.request import Request, urlopen

URL = os.environ.get("MLXRUNNER_URL", "http://127.0.0.1:8080")
DEVICES = ["kitchen light", "bedroom light", "heating", "door"]
SYSTEM = f"You control a home with these devices: {', '.join(DEVICES)}. Answer as JSON."
SCHEMA = {
    "type": "object",
    "properties": {"device": {"enum": DEVICES}, "action": {"enum": ["on", "off", "none"]}},
    "required": ["device", "action"],
    "additionalProperties": False,
}


def ask(command: str, state: dict[str, str]) -> dict:
    content = f"Command: {command}\nState: {json.dumps(state)}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    form = {"type": "json_schema", "json_schema": {"name": "action", "schema": SCHEMA}}
    body = json.dumps({"messages": messages, "response_format": form}).encode()
    request = Request(f"{URL}/v1/chat/completions", body, {"content-type": "application/json"})
    try:
        return json.load(urlopen(request))
    except OSError as error:
        sys.exit(f"{URL}: {error}; `mlxrunner serve MODEL` starts a server")


home = dict.fromkeys(DEVICES, "off")
for line in sys.stdin:
    answer = ask(line.strip(), home)
    chosen = json.loads(answer["choices"][0]["message"]["content"])
    home[chosen["device"]] = chosen["action"]
    print(chosen, answer["usage"]["prompt_tokens_details"], flush=True)
