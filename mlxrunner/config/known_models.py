"""Short names of well-known models, as Ollama writes them, and the hub repositories behind them.

The authors of mlxrunner have not tried these repositories, which others maintain. A `*` marks the
size that the name of a family alone stands for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

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
    """Return the hub id behind a short name; any other name, such as a directory's, as it is."""
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
