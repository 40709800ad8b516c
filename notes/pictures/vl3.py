import sys

sys.path.insert(0, "/work/w/pictures-proto")
import vl
import mlx.core as mx
import random
from mlxrunner.runner import Runner
from mlxrunner.models.facts import ModelFacts
from mlxrunner.testing import ByteTokenizer
import mlx_vlm.models.cache as vc
import mlxrunner.engine.requests as rq

rq.check_tokens = lambda *a: None
VOC = 300

import hashlib

from mlxrunner.pictures.model import SeeingModel
from mlxrunner.pictures.table import PictureTable
from mlxrunner.system import mlx_vlm_internals as internals


def add(sm, ids, px, s):
    b, e = internals.span(sm.inner, ids)
    grid = None
    if internals.has_axes(sm.inner):
        t, h, w = px["image_grid_thw"][0].tolist()
        grid = (t, h // 2, w // 2)
    pic = sm._table.add(hashlib.sha256(str(s).encode()).digest(), e - b, grid)
    sm.keep(pic, internals.see(sm.inner, ids, px))
    return ids[:b] + pic.ids.tolist() + ids[e:]


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
    if f.deepstack_visual_embeds is not None and pics:
        kw |= dict(
            visual_pos_masks=f.visual_pos_masks, deepstack_visual_embeds=f.deepstack_visual_embeds
        )
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
    pm = SeeingModel(model, PictureTable())
    r = Runner(
        pm,
        ByteTokenizer(),
        ModelFacts(kind, 2048, True, {"full": 2}, VOC, False),
        context=1024,
        prefill_step=32,
    )
    rnd = random.Random(1)
    pics = []
    for s in range(4):
        ids, px = vl.picture(kind, s)
        pics.append((ids, px, add(pm, ids, px, s)))
    history = [("t", [rnd.randrange(1, 280) for _ in range(10)])]
    bad = 0
    n = 0
    reused = 0
    ev = 0
    for turn in range(25):
        if turn % 6 == 5:
            history = history[: rnd.randrange(1, len(history))]
        if rnd.random() < 0.5:
            history.append(("p", rnd.randrange(4)))
        history.append(("t", [rnd.randrange(1, 280) for _ in range(rnd.randrange(1, 20))]))
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


for k in sys.argv[1:] or [
    "qwen3_vl",
    "mistral3",
    "pixtral",
    "internvl_chat",
    "gemma3",
    "idefics3",
    "smolvlm",
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
]:
    try:
        main(k)
    except Exception:
        import traceback

        traceback.print_exc()
