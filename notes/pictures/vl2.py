import sys

sys.path.insert(0, "/tmp/lead")
import vl
import mlx.core as mx
import numpy as np
import random
from mlxrunner.runner import Runner
from mlxrunner.models.facts import ModelFacts
from mlxrunner.testing import ByteTokenizer
import mlx_vlm.models.cache as vc
from mlx_lm.models import cache as lc
import mlxrunner.engine.requests as rq

rq.check_tokens = lambda *a: None
VOC = 300


class PictureModel:
    def __init__(self, model):
        self.inner = model
        self.lm = model.language_model
        self.next = VOC
        self.rows = {}  # first id -> rows
        self.grid = {}

    @property
    def layers(self):
        return self.lm.layers

    def make_cache(self):
        if not hasattr(self.lm, "make_cache"):
            return [lc.KVCache() for _ in self.layers]
        out = []
        for c in self.lm.make_cache():
            if type(c) is vc.KVCache:
                out.append(lc.KVCache())
            elif type(c) is vc.RotatingKVCache:
                out.append(lc.RotatingKVCache(c.max_size, c.keep))
            else:
                raise TypeError(type(c))
        return out

    def add(self, ids, px):
        f = self.inner.get_input_embeddings(
            mx.array([ids]), mask=mx.ones((1, len(ids)), mx.int32), **px
        )
        at = [i for i, t in enumerate(ids) if t == 290]
        rows = f.inputs_embeds[0][mx.array(at)]
        mx.eval(rows)
        first = self.next
        self.next += len(at)
        self.rows[first] = rows
        it = iter(range(first, first + len(at)))
        if "image_grid_thw" in px:
            self.grid[first] = px["image_grid_thw"][0].tolist()
        return [next(it) if t == 290 else t for t in ids]

    def embed(self, tokens):
        lm = self.lm
        e = (lm.model if hasattr(lm, "model") else lm).embed_tokens
        ids = np.array(tokens[0])
        out = e(mx.array(np.where(ids < VOC, ids, 0))[None])
        if (ids >= VOC).any():
            firsts = sorted(self.rows)
            allrows = mx.concatenate([self.rows[f] for f in firsts])
            g = allrows[mx.array(np.where(ids < VOC, 0, ids - VOC))][None]
            out = mx.where(mx.array(ids < VOC)[None, :, None], out, g.astype(out.dtype))
        return out

    def positions(self, n):
        full = np.array(self.text()[:n] if False else self.text())
        return full

    def __call__(self, tokens, cache=None):
        kw = {}
        if hasattr(self.lm, "get_rope_index"):
            off = cache[0].offset
            n = tokens.shape[1]
            have = list(self.tokens(off)) if off else []
            all_ = np.array(have[:off] + np.array(tokens[0]).tolist())
            kw["position_ids"] = mx.array(self.axes(all_)[:, off : off + n])[:, None, :]
            kw["rope_deltas"] = mx.array([[0]])
        return self.lm(tokens, inputs_embeds=self.embed(tokens), cache=cache, **kw).logits

    def axes(self, ids):
        out = []
        p = 0
        i = 0
        while i < len(ids):
            t = int(ids[i])
            if t in self.grid:
                T, H, W = self.grid[t]
                H //= 2
                W //= 2
                g = (
                    np.stack(
                        np.meshgrid(np.arange(T), np.arange(H), np.arange(W), indexing="ij")
                    ).reshape(3, -1)
                    + p
                )
                out.append(g)
                i += T * H * W
                p = int(g.max()) + 1
            else:
                out.append(np.full((3, 1), p))
                p += 1
                i += 1
        return np.concatenate(out, 1)


def reference(model, ids, pics, n):
    """mlx-vlm's own path, cold: all pictures at once."""
    px = {}
    if pics:
        keys = pics[0].keys()
        px = {
            k: mx.concatenate(
                [p[k] for p in pics],
                axis=(1 if model.config.model_type in ("idefics3", "smolvlm") else 0),
            )
            for k in keys
        }
    x = mx.array([ids])
    lm = model.language_model
    if hasattr(lm, "_rope_deltas"):
        lm._rope_deltas = None
        lm._position_ids = None
    kw = {}
    f = (
        model.get_input_embeddings(x, mask=mx.ones(x.shape, mx.int32), **px)
        if pics
        else model.get_input_embeddings(x)
    )
    if f.position_ids is not None and pics:
        kw = dict(position_ids=f.position_ids, rope_deltas=f.rope_deltas)
    cache = vc.make_prompt_cache(lm)
    lo = lm(x, inputs_embeds=f.inputs_embeds, cache=cache, **kw).logits[:, -1]
    out = []
    for _ in range(n):
        t = int(mx.argmax(lo[0]).item())
        out.append(t)
        kw2 = dict(rope_deltas=f.rope_deltas) if kw else {}
        lo = lm(mx.array([[t]]), cache=cache, **kw2).logits[:, -1]
    return out


def main(kind):
    mx.random.seed(3)
    model, c = vl.build(kind)
    from mlx.utils import tree_map

    model.update(tree_map(lambda x: x * 3 if x.ndim > 1 else x, model.parameters()))
    mx.eval(model.parameters())
    pm = PictureModel(model)
    r = Runner(
        pm,
        ByteTokenizer(),
        ModelFacts(kind, 2048, True, {"full": 2}, VOC, False),
        context=1024,
        prefill_step=32,
    )
    pm.tokens = lambda off: r._cache.entry.tokens.array
    rnd = random.Random(1)
    pics = []
    for s in range(4):
        ids, px = vl.picture(kind, s)
        pics.append((ids, px, pm.add(ids, px)))
    history = [("t", [rnd.randrange(280) for _ in range(10)])]
    bad = 0
    n = 0
    reused = 0
    ev = 0
    for turn in range(25):
        if turn % 6 == 5:
            history = history[: rnd.randrange(1, len(history))]
        if rnd.random() < 0.5:
            history.append(("p", rnd.randrange(4)))
        history.append(("t", [rnd.randrange(280) for _ in range(rnd.randrange(1, 20))]))
        ours = []
        theirs = []
        px = []
        for k, v in history:
            if k == "t":
                ours += v
                theirs += v
            else:
                ours += pics[v][2]
                theirs += pics[v][0]
                px.append(pics[v][1])
        if len(ours) > 900:
            history = history[:2]
            continue
        res = r.complete(ours, max_tokens=6, stop_tokens=[])
        toks = res.tokens
        ref = reference(model, theirs, px, 6)
        n += 1
        bad += toks != ref
        reused += res.usage.cached_tokens
        ev += len(ours)
        if toks != ref and bad < 3:
            print(kind, turn, toks, ref, len(px))
    # does the picture matter
    a = reference(model, pics[0][0] + [5, 6], [pics[0][1]], 6)
    b = reference(model, pics[1][0] + [5, 6], [pics[1][1]], 6)
    print(kind, "requests", n, "wrong", bad, "reused", reused, "of", ev, "picture matters", a != b)


for k in sys.argv[1:] or ["gemma3", "idefics3", "smolvlm", "llava", "qwen2_vl", "qwen2_5_vl"]:
    try:
        main(k)
    except Exception:
        import traceback

        traceback.print_exc()
