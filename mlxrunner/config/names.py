"""The names that other programs give to our options, and to models.

`SAME` has names that mean the same as ours, value for value: the lines of a batch take them.
`MEANT` has names for which another of ours, or nothing, is the nearest: errors mention it. Knows
nothing about flags: names are written with underscores.

The last table has short names of well-known models, as Ollama writes them, and the hub repositories
that they stand for. The authors of mlxrunner have not tried these repositories, which others
maintain. A `*` marks the size that the name of a family alone stands for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return ours for each name of others; a line of the table has ours, and theirs by commas."""
    return {name: ours for ours, names in table.items() for name in names.split(", ")}


SAME = _by_name(
    {
        "max_tokens": "max_completion_tokens, max_output_tokens, n_predict, num_predict, "
        "max_new_tokens",
        "template": "chat_template_kwargs",
        "choices": "guided_choice",
        "schema": "guided_json, json_schema",
        "prompt": "prompt_token_ids",
        "penalty_context": "repeat_last_n, repetition_context_size",
        "repetition_penalty": "repeat_penalty",
        "stop": "stop_sequences",
        "seed": "random_seed",
    }
)
"""Our name for each name of another program that means the same."""

MEANT = _by_name(
    {
        "temperature": "temp",
        "seed": "seeds",
        "max_tokens": "predict, length, max_length, max_gen_len",
        "stop": "stop_strings, reverse_prompt",
        "response_format": "format",
        'template: {"enable_thinking": false}': "enable_thinking",
        'template: {"enable_thinking": true}': "think, thinking",
        "reasoning_effort": "reasoning",
        "tools": "functions",
        "prompt": "text, input, question, instruction, query, content",
        "system": "instructions, system_prompt, sys",
        "messages": "conversation, conversations, chat",
        "context": "ctx_size, n_ctx, num_ctx, max_model_len, max_kv_size, max_seq_len",
        "kv_bits": "cache_type_k, cache_type_v, kv_cache_dtype",
        "prefill_step": "batch_size, ubatch_size, num_batch, prefill_step_size, "
        "max_num_batched_tokens",
        "keep": "n_keep, num_keep",
        "overflow": "context_shift, truncate, truncation",
        "parallel": "max_num_seqs, np",
        "schema": "guided_grammar, guided_regex, grammar, regex, json_schema_file",
        "template": "chat_template",
        "logprobs": "top_logprobs, n_probs",
        "model": "hf_repo, model_path",
        "session": "prompt_cache",
        "raw": "ignore_chat_template",
    }
)
"""Our nearest name for a name of another program that does not mean the same."""


COMMANDS = _by_name(
    {
        "models pull": "pull, download, models download",
        "models": "list, ls",
        "models rm": "rm, models remove, models delete",
        "generate": "prompt, complete, ask",
        "sessions": "logs",
        "config": "aliases, templates",
        "serve": "start, server",
        "show": "info, models show",
        "--version": "version",
        "sessions rm": "sessions remove, sessions delete",
        "models --known": "models known, models search, search",
    }
)
"""Our command for each command of another program."""

ADVICE: dict[str, str] = {
    "ps": "A command keeps no model loaded when it ends; a server lists its models at "
    "http://127.0.0.1:8080/slots.",
    "stop": "Ctrl-C ends a server or a chat, and frees the memory; `mlxrunner serve --keep-alive "
    "SECONDS` unloads models that nobody uses.",
    "unload": "Ctrl-C ends a server; `mlxrunner serve --keep-alive SECONDS` unloads models that "
    "nobody uses.",
    "load": "Each command loads its model by itself: mlxrunner chat MODEL.",
    "history": "`mlxrunner sessions list` lists saved chats, and `mlxrunner chat --continue` "
    "continues the last one.",
    "stats": "/stats in a chat shows what was reused; `mlxrunner report EVENTS` does it for a file "
    "that --events EVENTS wrote.",
    "status": "`mlxrunner doctor` checks the machine; a server answers at "
    "http://127.0.0.1:8080/health.",
    "push": "mlxrunner does not publish models; the hub's own program is `hf upload`.",
    "create": 'For a Modelfile, the config file has [models."ID"]; `mlxrunner config` shows '
    "where that file is.",
    "cp": "An alias in the config file gives a model another name; `mlxrunner config` shows where "
    "that file is.",
    "signin": "No account is needed; for restricted models of the hub: hf auth login.",
    "login": "No account is needed; for restricted models of the hub: hf auth login.",
    "convert": "mlx-lm converts and quantizes models: mlx_lm.convert --hf-path OWNER/NAME -q.",
    "embed": "Embeddings are not supported.",
    "set": "Options are set in the config file; `mlxrunner config` shows where it is.",
    "update": "pip or uv updates the program, as it was installed.",
    "uninstall": "pip or uv removes the program; `mlxrunner models rm ID` removes a model.",
}
"""The way to the same for each command of another program that none of ours replaces."""

FLAGS: dict[str, tuple[str, ...]] = {
    "format": ("schema", "json"),
    "response_format": ("schema",),
    "conversation": ("session",),
}
"""Our options, the nearest first, for names that mean something else in the line of a batch."""


WAYS: dict[str, str] = {
    "force": "A batch keeps an output that is there: choose another -o, remove it, or --resume.",
    "overwrite": "A batch keeps an output that is there: choose another -o, or remove it.",
    "stream": "Each answer comes as it is made, without an option.",
    "no_stream": "Each answer comes as it is made; generate --json prints it when it is whole.",
    "tensor_parallel": "It belongs after mlxrunner launch --hosts FILE --, with the command.",
    "pipeline": "It belongs after mlxrunner launch --hosts FILE --, with the command.",
    "option": "stdout gets the answer: `> FILE` keeps it. Each option of a request has its own "
    "flag, such as --temperature 0.8.",
    "output": "stdout gets the answer: `> FILE` keeps it, and --json prints it as JSON.",
    "no_color": "NO_COLOR=1 in the environment turns colours off.",
    "think": "--chat-template-var enable_thinking=true turns thinking on, and =false turns it off.",
    "format": 'In the file of --schema FILE, {"type": "object"} allows any JSON object.',
    "keepalive": "A command unloads its model when it ends; `mlxrunner serve` has --keep-alive.",
    "nowordwrap": "In a chat, --plain prints answers as they come.",
    "hidethinking": "In a chat, /think hide does that.",
    "template": "Variables of the chat template: --chat-template-var NAME=VALUE; the rows of a "
    "table: batch --row-template TEXT; a prompt of the config file: generate -t NAME.",
    "prompt_file": "A prompt can come from standard input: mlxrunner generate < FILE.",
    "file": "A prompt can come from standard input (mlxrunner generate < FILE); the files of a "
    "batch are its arguments; in a chat, /file FILE adds a text.",
}
"""A way to the same for each flag of other programs that no option of ours comes near."""

LONGEST = 40
"""The most characters of a name that is compared with all others."""


def plain(name: str) -> str:
    """Return a name as the tables have it: `--Max-Tokens` is `max_tokens`."""
    return name.lstrip("-").lower().replace("-", "_")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name among `known` that somebody who wrote `name` may have meant.

    A text that shows how to write it stands for a name with a value. Return None if there is none.
    """
    known, wanted = list(known), plain(name)
    meant = SAME.get(wanted) or MEANT.get(wanted)
    if meant is not None:
        return meant if meant.partition(":")[0] in known else None
    close = get_close_matches(wanted, known, n=1, cutoff=0.65) if len(wanted) <= LONGEST else []
    return close[0] if close else None


LETTERS: dict[str, tuple[str, ...]] = {
    "n": ("max_tokens", "n"),
    "v": ("version",),
    "c": ("context", "continue"),
    "f": ("file",),
    "o": ("option",),
}
"""Our names for each option of llama.cpp or llm that is one letter after one dash."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for an error that names `name`, or nothing."""
    found = nearest(name, known)
    return "" if found is None else f"did you mean {found!r}? "


TABLE = """
llama3.2:1b          0.7   Llama-3.2-1B-Instruct-4bit
llama3.2:3b*         1.8   Llama-3.2-3B-Instruct-4bit
llama3.1:8b*         4.5   Meta-Llama-3.1-8B-Instruct-4bit
llama3.3:70b*       39.7   Llama-3.3-70B-Instruct-4bit
qwen3:0.6b           0.4   Qwen3-0.6B-4bit
qwen3:1.7b           1.0   Qwen3-1.7B-4bit
qwen3:4b             2.3   Qwen3-4B-4bit
qwen3:8b*            4.6   Qwen3-8B-4bit
qwen3:14b            8.3   Qwen3-14B-4bit
qwen3:30b           17.2   Qwen3-30B-A3B-4bit
qwen3:32b           18.4   Qwen3-32B-4bit
qwen3-coder:30b*    17.2   Qwen3-Coder-30B-A3B-Instruct-4bit
qwen2.5:1.5b         0.9   Qwen2.5-1.5B-Instruct-4bit
qwen2.5:7b*          4.3   Qwen2.5-7B-Instruct-4bit
qwen2.5:14b          8.3   Qwen2.5-14B-Instruct-4bit
qwen2.5-coder:1.5b   0.9   Qwen2.5-Coder-1.5B-Instruct-4bit
qwen2.5-coder:7b*    4.3   Qwen2.5-Coder-7B-Instruct-4bit
qwen2.5-coder:32b   18.4   Qwen2.5-Coder-32B-Instruct-4bit
gemma2:2b            1.5   gemma-2-2b-it-4bit
gemma2:9b*           5.2   gemma-2-9b-it-4bit
gemma3:1b            0.8   gemma-3-1b-it-4bit
gemma3:4b*           3.4   gemma-3-4b-it-4bit
gemma3:12b           8.1   gemma-3-12b-it-4bit
gemma3:27b          16.8   gemma-3-27b-it-4bit
gpt-oss:20b*        12.1   gpt-oss-20b-MXFP4-Q8
gpt-oss:120b        63.4   gpt-oss-120b-MXFP4-Q8
phi4:14b*            8.3   phi-4-4bit
phi4-mini:3.8b*      2.2   Phi-4-mini-instruct-4bit
mistral:7b*          4.1   Mistral-7B-Instruct-v0.3-4bit
mistral-nemo:12b*    6.9   Mistral-Nemo-Instruct-2407-4bit
mistral-small:24b*  13.3   Mistral-Small-24B-Instruct-2501-4bit
deepseek-r1:1.5b     1.0   DeepSeek-R1-Distill-Qwen-1.5B-4bit
deepseek-r1:8b*      4.5   DeepSeek-R1-Distill-Llama-8B-4bit
deepseek-r1:14b      8.3   DeepSeek-R1-Distill-Qwen-14B-4bit
deepseek-r1:32b     18.4   DeepSeek-R1-Distill-Qwen-32B-4bit
smollm3:3b*          1.7   SmolLM3-3B-4bit
granite3.3:2b*       1.4   granite-3.3-2b-instruct-4bit
lfm2:1.2b*           0.7   LFM2-1.2B-4bit
"""
"""The name, the gigabytes to download, and the repository of mlx-community."""
OWNER = "mlx-community"
MOST_RELATED = 8
"""Most models that a hint names."""


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name."""

    name: str
    hub_id: str
    nbytes: int
    """Bytes to download and to hold in memory, roughly."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of weights and of a short conversation, roughly."""
        return self.nbytes * 11 // 10 + 500_000_000


@cache
def known_models() -> dict[str, KnownModel]:
    """Return the models of TABLE by name, each family also by its own name and with `:latest`."""
    found = {}
    for line in TABLE.strip().splitlines():
        marked, gigabytes, repository = line.split()
        name = marked.rstrip("*")
        model = KnownModel(name, f"{OWNER}/{repository}", round(float(gigabytes) * 1e9))
        family = name.partition(":")[0]
        own = (name, family, f"{family}:latest") if marked != name else (name,)
        found.update(dict.fromkeys(own, model))
    return found


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name; any other name, such as a directory's, as it is."""
    model = known_models().get(name.lower())
    return name if model is None or os.path.isdir(name) else model.hub_id


def suggestion_for(name: str) -> str:
    """Return a hint at the models nearest to `name`, or "" if none is near."""
    if page := re.search(r"\b(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", name[:300]):
        return f"did you mean {page[1]!r}? "
    family, _, size = name.lower().partition(":")
    sizes = [one.name for one in dict.fromkeys(known_models().values())]
    same = [one for one in sizes if one.partition(":")[0] == family]
    if same and size:
        return f"{family} is known as {', '.join(same)}; "
    if written := re.fullmatch(r"([a-z]+)[\d.]*", family[:60]):  # another generation of a family
        related = [one for one in sizes if re.match(rf"{written[1]}[\d.:]", one)]
        if related:
            return f"there are {', '.join(related[:MOST_RELATED])}; "
    plain = {re.sub(r"[^a-z0-9.]", "", one): one for one in sizes}
    wanted = re.sub(r"[^a-z0-9.]|instruct|chat|4bit|mlx", "", name.lower()[:60])
    close = get_close_matches(wanted, plain, n=1, cutoff=0.7)
    return f"did you mean {plain[close[0]]!r}? " if close else ""
