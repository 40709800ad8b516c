import sys

sys.path.insert(0, "/work/w/pictures-proto")
import io
import json
from pathlib import Path

import numpy as np
from mlxrunner.pictures.loading import with_eyes
from PIL import Image

from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.tokenizer import load_tokenizer

for kind in sys.argv[1:] or ["qwen2_5_vl", "gemma3", "idefics3"]:
    d = Path("/tmp/lead/m_" + kind)
    config = json.loads((d / "config.json").read_text())
    m, t = with_eyes(d, internals.load_model(d), load_tokenizer(d))
    print(kind, repr(t._written))
    r = Runner(m, t, facts_of(m, config), context=1500, prefill_step=64)
    rng = np.random.default_rng(0)
    b = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(b, "PNG")
    msgs = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this? "},
                {"type": "image", "image": b.getvalue()},
            ],
        }
    ]
    a = r.complete(msgs, max_tokens=8, repetition_penalty=1.1)
    print(a.tokens, a.usage.prompt_tokens, a.usage.cached_tokens, t._sight.encoded)
    msgs += [
        {"role": "assistant", "content": a.text},
        {"role": "user", "content": "And its colour?"},
    ]
    a = r.complete(msgs, max_tokens=8)
    print(a.tokens, a.usage.prompt_tokens, a.usage.cached_tokens, t._sight.encoded)
