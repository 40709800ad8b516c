import copy
import importlib

import mlx.core as mx
import numpy as np

mx.random.seed(0)
TXT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=300,
    max_position_embeddings=2048,
)


def conf(kind):
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        v = dict(
            depth=2,
            embed_dim=32,
            hidden_size=32,
            num_heads=2,
            patch_size=4,
            spatial_patch_size=4,
            spatial_merge_size=2,
            in_channels=3,
            mlp_ratio=2.0,
        )
        if kind == "qwen2_5_vl":
            v = dict(
                model_type=kind,
                depth=2,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=32,
                num_heads=2,
                patch_size=4,
                spatial_patch_size=4,
                spatial_merge_size=2,
                window_size=16,
                fullatt_block_indexes=[1],
            )
        else:
            v["model_type"] = kind
        return dict(
            model_type=kind,
            vision_config=v,
            image_token_id=290,
            video_token_id=291,
            vision_start_token_id=292,
            vision_end_token_id=293,
            vision_token_id=294,
            rope_theta=10000.0,
            rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2]),
            tie_word_embeddings=True,
            **TXT,
        )
    if kind == "gemma3":
        return dict(
            model_type=kind,
            text_config=dict(
                model_type="gemma3_text",
                head_dim=8,
                sliding_window=32,
                sliding_window_pattern=2,
                query_pre_attn_scalar=8,
                mm_tokens_per_image=16,
                **TXT,
            ),
            vision_config=dict(
                model_type="siglip_vision_model",
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=2,
                patch_size=4,
                image_size=32,
            ),
            image_token_index=290,
            hidden_size=32,
            vocab_size=300,
        )
    if kind in ("idefics3", "smolvlm"):
        return dict(
            model_type=kind,
            text_config=dict(model_type="llama", rope_theta=10000.0, **TXT),
            vision_config=dict(
                model_type="idefics3_vision",
                hidden_size=32,
                num_attention_heads=2,
                patch_size=4,
                num_hidden_layers=2,
                intermediate_size=64,
                image_size=32,
            ),
            scale_factor=2,
            image_token_id=290,
            vocab_size=300,
        )
    if kind == "llava":
        return dict(
            model_type=kind,
            text_config=dict(model_type="llama", **TXT),
            vision_config=dict(
                model_type="clip_vision_model",
                hidden_size=32,
                num_attention_heads=2,
                patch_size=4,
                num_hidden_layers=2,
                intermediate_size=64,
                image_size=32,
                projection_dim=32,
                vocab_size=300,
            ),
            image_token_index=290,
            vocab_size=300,
        )
    if kind == "qwen3_vl":
        return dict(
            model_type=kind,
            text_config=dict(
                model_type="qwen3_vl_text",
                head_dim=8,
                rope_theta=10000.0,
                rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]),
                **TXT,
            ),
            vision_config=dict(
                model_type=kind,
                depth=3,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=32,
                num_heads=2,
                patch_size=4,
                spatial_patch_size=4,
                spatial_merge_size=2,
                num_position_embeddings=64,
                deepstack_visual_indexes=[0, 1],
            ),
            image_token_id=290,
            video_token_id=291,
            vision_start_token_id=292,
            vision_end_token_id=293,
            vocab_size=300,
        )
    if kind in ("mistral3", "pixtral"):
        t = dict(TXT, head_dim=8, rope_theta=10000.0)
        return dict(
            model_type=kind,
            text_config=dict(model_type="mistral", **t),
            vision_config=dict(
                model_type="pixtral",
                num_hidden_layers=2,
                hidden_size=32,
                head_dim=16,
                intermediate_size=64,
                num_attention_heads=2,
                image_size=64,
                patch_size=4,
            ),
            image_token_index=290,
            vocab_size=300,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        )
    if kind == "internvl_chat":
        return dict(
            model_type=kind,
            text_config=dict(model_type="qwen2", **TXT),
            vision_config=dict(
                model_type="intern_vit_6b",
                hidden_size=32,
                num_attention_heads=2,
                patch_size=4,
                num_hidden_layers=2,
                intermediate_size=64,
                image_size=32,
            ),
            image_token_index=290,
            vocab_size=300,
            downsample_ratio=0.5,
        )


def build(kind):
    m = importlib.import_module("mlx_vlm.models." + kind)
    c = conf(kind)
    if kind.startswith("qwen2"):
        c["text_config"] = {k: v for k, v in c.items() if k != "vision_config"}
    mc = m.ModelConfig.from_dict(copy.deepcopy(c))
    from mlx_vlm.utils import update_module_configs

    mc = update_module_configs(mc, m, copy.deepcopy(c), ["text", "vision"])
    model = m.Model(mc)
    model.eval()
    mx.eval(model.parameters())
    return model, c


def picture(kind, seed):
    r = np.random.default_rng(seed)
    if kind.startswith("qwen"):
        t, h, w = 1, 6, 4
        px = mx.array(r.normal(size=(t * h * w, 3 * 2 * 4 * 4)).astype(np.float32))
        n = t * h * w // 4
        return [292] + [290] * n + [293], dict(
            pixel_values=px, image_grid_thw=mx.array([[t, h, w]])
        )
    if kind == "gemma3":
        return [295] + [290] * 16 + [296], dict(
            pixel_values=mx.array(r.normal(size=(1, 3, 32, 32)).astype(np.float32))
        )
    if kind in ("idefics3", "smolvlm"):
        return [295] + [290] * 16 + [296], dict(
            pixel_values=mx.array(r.normal(size=(1, 1, 3, 32, 32)).astype(np.float32))
        )
    if kind == "mistral3":
        return ([290] * 4 + [297]) * 2 + [290] * 4 + [298], dict(
            pixel_values=mx.array(r.normal(size=(1, 3, 24, 32)).astype(np.float32)),
            image_sizes=mx.array([[24, 32]]),
        )
    if kind == "pixtral":
        return ([290] * 8 + [297]) * 5 + [290] * 8 + [298], dict(
            pixel_values=mx.array(r.normal(size=(1, 3, 24, 32)).astype(np.float32)),
            image_sizes=mx.array([[24, 32]]),
        )
    if kind == "internvl_chat":
        return [295] + [290] * 16 + [296], dict(
            pixel_values=mx.array(r.normal(size=(1, 3, 32, 32)).astype(np.float32))
        )
    if kind == "llava":
        return [290] * 64, dict(
            pixel_values=mx.array(r.normal(size=(1, 3, 32, 32)).astype(np.float32))
        )


if __name__ == "__main__":
    for kind in ["qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "smolvlm", "llava"]:
        try:
            model, c = build(kind)
            ids, px = picture(kind, 1)
            f = model.get_input_embeddings(
                mx.array([ids]), mask=mx.ones((1, len(ids)), mx.int32), **px
            )
            print(
                kind,
                f.inputs_embeds.shape,
                f.inputs_embeds.dtype,
                [
                    type(x).__name__
                    for x in (
                        model.language_model.make_cache()
                        if hasattr(model.language_model, "make_cache")
                        else []
                    )
                ],
                {k: getattr(v, "shape", v) for k, v in vars(f).items() if v is not None},
            )
        except Exception:
            import traceback

            traceback.print_exc()
