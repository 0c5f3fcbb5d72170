#!/usr/bin/env python3
"""Write a small DeepSeek-V3 checkpoint as GGUF, so that llama.cpp serves the very same weights.

    python convert_gguf.py CHECKPOINT_FOLDER OUT.gguf [--dtype bf16|f16|f32]

The MTP layer is kept, as the block after the last one, which is where llama.cpp looks for it.
Needs the packages numpy and gguf. All tensors are in memory at once.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

# What a layer's tensors are called in the checkpoint, and in GGUF.
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
for part in ("gate", "up", "down"):
    NAMES[f"mlp.{part}_proj.weight"] = f"ffn_{part}.weight"
    NAMES[f"mlp.shared_experts.{part}_proj.weight"] = f"ffn_{part}_shexp.weight"

OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# GGUF's metadata, and which number of the configuration each one is.
NUMBERS = dict(pair.split("=") for pair in """
    vocab_size=vocab_size context_length=max_position_embeddings embedding_length=hidden_size
    feed_forward_length=intermediate_size layer_norm_rms_eps=rms_norm_eps rope_freq_base=rope_theta
    rope_dimension_count=qk_rope_head_dim head_count=num_attention_heads q_lora_rank=q_lora_rank
    kv_lora_rank=kv_lora_rank value_length=kv_lora_rank value_length_mla=v_head_dim
    leading_dense_block_count=first_k_dense_replace nextn_predict_layers=num_nextn_predict_layers
    expert_count=n_routed_experts expert_used_count=num_experts_per_tok
    expert_shared_count=n_shared_experts expert_group_count=n_group
    expert_group_used_count=topk_group expert_feed_forward_length=moe_intermediate_size
    expert_weights_scale=routed_scaling_factor expert_weights_norm=norm_topk_prob
    bos_token_id=bos_token_id eos_token_id=eos_token_id
""".split())


def read_tensors(path):
    """The tensors of a safetensors file, as float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
        elif entry["dtype"] == "F32":
            values = np.frombuffer(data[begin:end], "<f4")
        else:
            raise SystemExit(f"{name} is {entry['dtype']}: only BF16 and F32 are read")
        yield name, values.reshape(entry["shape"])


def layer_tensors(layer, config):
    """The tensors of one layer under GGUF's names."""
    for name, values in layer.items():
        if name == "self_attn.kv_b_proj.weight":
            # llama.cpp absorbs keys and values apart from each other, the keys transposed.
            nope, n_head = config["qk_nope_head_dim"], config["num_attention_heads"]
            heads = values.reshape(n_head, nope + config["v_head_dim"], -1)
            yield "attn_k_b.weight", heads[:, :nope].transpose(0, 2, 1)
            yield "attn_v_b.weight", heads[:, nope:]
        elif not name.startswith("mlp.experts."):
            yield NAMES[name], values
    if "mlp.experts.0.up_proj.weight" in layer:
        for part in ("gate", "up", "down"):
            names = [f"mlp.experts.{n}.{part}_proj" for n in range(config["n_routed_experts"])]
            yield f"ffn_{part}_exps.weight", np.stack([layer[f"{name}.weight"] for name in names])


def write_tokenizer(writer, folder):
    """Splits text as Llama 3 does, which differs in contractions written in capitals."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.get)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    args = parser.parse_args()
    config = json.loads((args.checkpoint / "config.json").read_text())
    if config["architectures"] != ["DeepseekV3ForCausalLM"] or config.get("rope_scaling"):
        raise SystemExit("only DeepSeek-V3 without scaled rotary embeddings is converted")
    writer = gguf.GGUFWriter(args.out, "deepseek2")
    for key, of_config in NUMBERS.items():
        getattr(writer, f"add_{key}")(config[of_config])
    writer.add_block_count(config["num_hidden_layers"] + config["num_nextn_predict_layers"])
    # In absorbed form all query heads share one latent key.
    writer.add_head_count_kv(1)
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    write_tokenizer(writer, args.checkpoint)
    tensors, layers = {}, {}
    for path in sorted(args.checkpoint.glob("*.safetensors")):
        for name, values in read_tensors(path):
            if name in OUTSIDE_LAYERS:
                tensors[OUTSIDE_LAYERS[name]] = values
            else:
                _, _, index, rest = name.split(".", 3)
                layers.setdefault(index, {})[rest] = values
    for index, layer in layers.items():
        tensors |= {f"blk.{index}.{name}": t for name, t in layer_tensors(layer, config)}
    kinds = gguf.GGMLQuantizationType
    for name, values in tensors.items():
        # Vectors and the router are float32 in every GGUF file.
        kind = kinds["F32" if values.ndim == 1 or "ffn_gate_inp" in name else args.dtype.upper()]
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
