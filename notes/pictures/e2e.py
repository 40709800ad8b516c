import sys

sys.path.insert(0, "/work/w/pictures-proto")
import write as w
import mlx.core as mx
import numpy as np
import random
import mlx_vlm.utils as u
import mlx_vlm.models.cache as vc
from PIL import Image
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.pictures.sight import Sight
from mlxrunner.pictures.model import SeeingModel
from mlxrunner.runner import Runner
from mlxrunner.models.facts import ModelFacts
from mlxrunner.tokenizer import load_tokenizer
from mlxrunner.cache.tokens import as_tokens
import mlxrunner.engine.requests as rq

rq.check_tokens = lambda *a: None
from mlx.utils import tree_map

for kind in sys.argv[1:] or ["qwen2_5_vl", "gemma3", "idefics3"]:
    mx.random.seed(1)
    d = w.write("/tmp/lead/m_" + kind, kind)
    model = u.load_model(d, lazy=True)
    model.eval()
    p = u.load_processor(d, add_detokenizer=False)
    model.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, model.parameters()))
    mx.eval(model.parameters())
    sight = Sight(model, p, internals.marker_of(p), b"x")
    sm = SeeingModel(model, sight)
    tok = load_tokenizer(d)
    r = Runner(
        sm,
        tok,
        ModelFacts(kind, 2048, True, {"full": 2}, 300, False),
        context=1500,
        prefill_step=32,
    )
    rng = np.random.default_rng(0)
    rnd = random.Random(0)
    pix = [
        rng.integers(0, 255, (rnd.randint(10, 60), rnd.randint(10, 60), 3), dtype=np.uint8)
        for _ in range(4)
    ]
    bad = n = reused = total = 0
    hist = []
    for turn in range(20):
        if turn % 5 == 4:
            hist = hist[: rnd.randrange(1, len(hist))]
        c = []
        if rnd.random() < 0.6:
            c.append(("p", rnd.randrange(4)))
        c.append(("t", "".join(rnd.choice("abc de") for _ in range(rnd.randint(3, 20)))))
        hist.append(c)
        mark = w.MARK[w.fam(kind)]
        text = (
            "".join(
                "<|im_start|>user\n"
                + "".join(mark if k == "p" else v for k, v in c)
                + "<|im_end|>\n"
                for c in hist
            )
            + "<|im_start|>assistant\n"
        )
        ps = [pix[v] for c in hist for k, v in c if k == "p"]
        prep = [sight.prepare(x) for x in ps]
        parts = text.split(sight.marker)
        full = parts[0] + "".join(q.text + t for q, t in zip(prep, parts[1:]))
        tokens = sight.placed(as_tokens(tok.encode(full)), prep)
        if len(tokens) > 1400:
            hist = hist[-1:]
            continue
        res = r.complete(tokens, max_tokens=6, stop_tokens=[])
        sight.settle()
        out = (
            p(text=[text], images=[Image.fromarray(x) for x in ps], add_special_tokens=False)
            if ps
            else None
        )
        ids = np.array(out["input_ids"])[0] if ps else np.array(tok.encode(text))
        assert len(ids) == len(tokens), (len(ids), len(tokens))
        px = (
            {k: mx.array(v) for k, v in out.items() if k not in ("input_ids", "attention_mask")}
            if ps
            else {}
        )
        x = mx.array(ids.tolist())[None]
        lm = model.language_model
        if hasattr(lm, "_rope_deltas"):
            lm._rope_deltas = None
            lm._position_ids = None
        f = (
            model.get_input_embeddings(x, mask=mx.ones(x.shape, mx.int32), **px)
            if ps
            else model.get_input_embeddings(x)
        )
        kw = (
            dict(position_ids=f.position_ids, rope_deltas=f.rope_deltas)
            if f.position_ids is not None and ps
            else {}
        )
        cache = vc.make_prompt_cache(lm)
        lo = lm(x, inputs_embeds=f.inputs_embeds, cache=cache, **kw).logits[:, -1]
        ref = []
        for _ in range(6):
            t = int(mx.argmax(lo[0]).item())
            ref.append(t)
            lo = lm(
                mx.array([[t]]), cache=cache, **({"rope_deltas": f.rope_deltas} if kw else {})
            ).logits[:, -1]
        n += 1
        bad += ref != res.tokens
        reused += res.usage.cached_tokens
        total += len(tokens)
        if ref != res.tokens:
            print(turn, ref, res.tokens)
    print(
        kind,
        "requests",
        n,
        "wrong",
        bad,
        "reused",
        reused,
        "of",
        total,
        "encoder ran",
        sight.encoded,
    )
