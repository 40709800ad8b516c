import sys
import json

sys.path.insert(0, "/work/w/pictures-proto")
from pathlib import Path

import mlx.core as mx
import vl
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = {
    "qwen": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "idefics3": ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    + [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)],
}
MARK = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
}


def fam(kind):
    return "qwen" if kind.startswith("qwen") else "idefics3" if kind == "smolvlm" else kind


def write(folder, kind):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    f = fam(kind)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={l: i for i, l in enumerate(alphabet)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", *SPECIAL[f]])
    t.save(str(folder / "tokenizer.json"))
    ids = {s: t.token_to_id(s) for s in SPECIAL[f]}
    tmpl = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type']=='image' %}"
        + MARK[f]
        + "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    conf = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<s>",
        "chat_template": tmpl,
    }
    if f == "gemma3":
        conf |= {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "extra_special_tokens": {
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(conf))
    model, c = vl.build(kind)
    img = ids[{"qwen": "<|image_pad|>", "gemma3": "<image_soft_token>", "idefics3": "<image>"}[f]]
    for k in ("image_token_id", "image_token_index"):
        c[k] = img
    if f == "qwen":
        c |= dict(
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    c["eos_token_id"] = t.token_to_id("<|im_end|>")
    if kind.startswith("qwen2"):
        c.pop("text_config", None)
    (folder / "config.json").write_text(json.dumps(c))
    pre = {
        "qwen": dict(
            image_processor_type="Qwen2VLImageProcessor",
            patch_size=4,
            temporal_patch_size=2,
            merge_size=2,
            min_pixels=64,
            max_pixels=1024,
        ),
        "gemma3": dict(
            image_processor_type="Gemma3ImageProcessor",
            size={"height": 32, "width": 32},
            image_seq_length=16,
            do_resize=True,
            do_rescale=True,
            do_normalize=True,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        "idefics3": dict(
            image_processor_type="Idefics3ImageProcessor",
            size={"longest_edge": 64},
            max_image_size={"longest_edge": 32},
            do_image_splitting=True,
            do_resize=True,
            do_rescale=True,
            do_normalize=True,
            do_pad=True,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            resample=1,
        ),
    }[f]
    (folder / "preprocessor_config.json").write_text(json.dumps(pre))
    (folder / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": {
                    "qwen": "Qwen2VLProcessor",
                    "gemma3": "Gemma3Processor",
                    "idefics3": "Idefics3Processor",
                }[f],
                "image_seq_len": 16,
                "image_seq_length": 16,
            }
        )
    )
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    return folder


if __name__ == "__main__":
    import mlx_vlm.utils as u
    import numpy as np
    from PIL import Image

    for kind in sys.argv[1:] or ["qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3"]:
        try:
            d = write("/tmp/lead/m_" + kind, kind)
            m = u.load_model(d, lazy=True)
            p = u.load_processor(d, add_detokenizer=False)
            im = Image.fromarray(
                np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
            )
            out = p(
                text=["Hi " + MARK[fam(kind)] + " there"], images=[im], add_special_tokens=False
            )
            print(kind, type(p).__name__, {k: (getattr(v, "shape", v)) for k, v in out.items()})
            print(repr(p.tokenizer.decode(np.array(out["input_ids"])[0].tolist()))[:300])
        except Exception:
            import traceback

            traceback.print_exc(limit=-3)
