"""Write a random checkpoint of Llama-8B-shaped blocks in several shards: weights that are large, not useful.

    python benchmarks/synthetic.py OUT --blocks 16 --shards 4

Each block holds 218 M weights (436 MB in bf16); memory stays at one tensor. 16 blocks with their embedding
make an 8 GB checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCAB, KV = 4096, 14336, 32000, 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def shapes(blocks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, in the order of the decoder."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(blocks):
        block = f"model.layers.{i}."
        yield block + "input_layernorm.weight", (HIDDEN,)
        yield block + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield block + "self_attn.k_proj.weight", (KV, HIDDEN)
        yield block + "self_attn.v_proj.weight", (KV, HIDDEN)
        yield block + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield block + "post_attention_layernorm.weight", (HIDDEN,)
        yield block + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield block + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield block + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write(out: Path, blocks: int, shards: int) -> None:
    """Write config.json, the shards and their index. Each shard is held in memory once."""
    out.mkdir(parents=True, exist_ok=True)
    names = list(shapes(blocks))
    per_shard = -(-len(names) // shards)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in names[shard * per_shard : (shard + 1) * per_shard]
        }
        save_file(tensors, str(out / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (out / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": blocks}, indent=2))
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()
    write(args.out, args.blocks, args.shards)


if __name__ == "__main__":
    main()
