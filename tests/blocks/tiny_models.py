"""Tiny random models of the architectures that calibration has to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE = {"vocab_size": 128, "max_position_embeddings": 64, "initializer_range": 0.08}
LLAMA = BASE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = LLAMA | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MLA = LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BLOOM = {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.08}
GPT2 = {
    "vocab_size": 128,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.08,
}
FALCON = {"vocab_size": 128, "multi_query": True, "parallel_attn": True, "bias": False} | SMALL
OPT = BASE | SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}
NEOX = BASE | SMALL | {"intermediate_size": 128}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "llama-tied-bias": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", LLAMA),
    "mistral-window": ("MistralConfig", LLAMA | {"sliding_window": 8}),
    "granite": (
        "GraniteConfig",
        {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"residual_multiplier": 0.3},
    ),
    "gemma2": ("Gemma2Config", LLAMA | {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", LLAMA | {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "olmo2": ("Olmo2Config", {k: v for k, v in LLAMA.items() if k != "head_dim"}),
    "phi3": ("Phi3Config", LLAMA | {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "opt": ("OPTConfig", OPT),
    "falcon": ("FalconConfig", FALCON),
    "bloom": ("BloomConfig", BLOOM),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "deepseek_v2": ("DeepseekV2Config", MLA | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", MLA),
}


def save_model(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model as fp16; every vector gets values, so that losing one shows. changes: to its config."""
    import torch
    import transformers

    kind, config = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**config | changes))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn(parameter.shape) * 0.05)
            parameter.data = parameter.data.half()
    model.config.dtype = torch.float16
    model.save_pretrained(folder)
    return folder
