"""The answers that models of mlx-vlm give themselves, to a whole prompt at once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from support.seeing import Part, block_of


def joined(kind: str, pictures: list[dict[str, Any]]) -> dict[str, mx.array]:
    """Return what the encoder gets of several pictures at once."""
    axis = 1 if kind in ("idefics3", "smolvlm", "mllama") else 0
    names = pictures[0] if pictures else ()
    return {
        name: mx.array(np.concatenate([one[name] for one in pictures], axis=axis)) for name in names
    }


def looked_at(tokens: list[int], place: int, token: int) -> list[int]:
    """Return the numbers of the pictures that the token at `place` looks at (mllama)."""
    found, pictures = list[int](), 0
    for at in range(min(place + 1, len(tokens))):
        if tokens[at] == token:
            found = [*(found if at and tokens[at - 1] == token else []), pictures]
            pictures += 1
    return found


def masked_answer(
    model: Any, tokens: list[int], pictures: list[dict[str, Any]], count: int
) -> list[int]:
    """Return the greedy answer of a model that crosses to pictures, each token of it cold.

    All pictures are there at once, and a mask says which of their rows each token looks at. Tokens
    that look at none get nothing from the layers that cross.
    """
    from mlx_vlm.models.base import create_attention_mask

    token = model.config.image_token_index
    states, owners, answer = list[mx.array](), list[int](), list[int]()
    for number, inputs in enumerate(pictures):
        arrays = {name: mx.array(value) for name, value in inputs.items()}
        rows = model.get_input_embeddings(mx.array([[token]]), **arrays).cross_attention_states[0]
        kept = int(inputs["aspect_ratio_mask"].sum()) * 17
        states.append(rows)
        owners += [number] * kept + [-1] * (len(rows) - kept)
    text = model.language_model.model
    while True:
        both = [*tokens, *answer]
        looks = [looked_at(both[: len(tokens)], place, token) for place in range(len(both))]
        sees = mx.array([[owner in seen for owner in owners] for seen in looks])
        some = mx.array([[bool(seen)] for seen in looks])
        hidden = text.embed_tokens(mx.array([both]))
        causal = create_attention_mask(hidden, [None])
        for layer in text.layers:
            if not hasattr(layer, "cross_attn"):
                hidden = layer(hidden, mask=causal)
            elif pictures:
                mask = mx.where(sees, 0.0, -1e9)[None, None]
                given = {"cross_attention_states": mx.concatenate(states)[None]}
                found = layer.cross_attn(
                    layer.input_layernorm(hidden), attention_mask=mask, **given
                )
                hidden = hidden + mx.tanh(layer.cross_attn_attn_gate) * found * some
                found = layer.mlp(layer.post_attention_layernorm(hidden))
                hidden = hidden + mx.tanh(layer.cross_attn_mlp_gate) * found * some
        logits = model.language_model.lm_head(text.norm(hidden))
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        if len(answer) == count:
            return answer


def cold_answer(kind: str, model: Any, history: list[Part], count: int) -> list[int]:
    """Return the greedy answer of `model` itself to a whole prompt of texts and pictures."""
    tokens, pictures = list[int](), list[dict[str, Any]]()
    for what, part in history:
        block, inputs = (part, {}) if what == "text" else block_of(kind, part)
        tokens += block
        pictures += [inputs] if what == "picture" else []
    if kind == "mllama":
        return masked_answer(model, tokens, pictures, count)
    return own_answer(model, tokens, joined(kind, pictures), count)


def own_answer(model: Any, tokens: list[int], inputs: dict[str, mx.array], count: int) -> list[int]:
    """Return the greedy answer of mlx-vlm to a whole prompt, by the calls of its `generate`."""
    from mlx_vlm.models.cache import make_prompt_cache

    language, given, later = model.language_model, dict[str, Any](), dict[str, Any]()
    if hasattr(language, "_rope_deltas"):
        language._rope_deltas = language._position_ids = None
    prompt = mx.array([tokens])
    mask = {"mask": mx.ones(prompt.shape, mx.int32)} if inputs else {}
    found = model.get_input_embeddings(prompt, **mask, **inputs)
    if found.position_ids is not None and inputs:
        later = {"rope_deltas": found.rope_deltas}
        given = {"position_ids": found.position_ids, **later}
    if found.deepstack_visual_embeds is not None and inputs:
        given["visual_pos_masks"] = found.visual_pos_masks
        given["deepstack_visual_embeds"] = found.deepstack_visual_embeds
    if found.cross_attention_states is not None:
        given = later = {"cross_attention_states": found.cross_attention_states}
    cache, answer = make_prompt_cache(language), list[int]()
    embeddings = found.inputs_embeds
    logits = language(prompt, inputs_embeds=embeddings, cache=cache, **given).logits
    while True:
        answer.append(int(mx.argmax(logits[0, -1]).item()))
        if len(answer) == count:
            return answer
        logits = language(mx.array([[answer[-1]]]), cache=cache, **later).logits
