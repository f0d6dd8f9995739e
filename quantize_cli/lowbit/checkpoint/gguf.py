"""GGUF files of Llama models as Hugging Face checkpoints: names, config, tokenizer, fp16 weights.

The file's converter interleaved the two halves of every head of q and k (llama.cpp's rotary embedding turns
neighbouring pairs, Hugging Face's turns halves); that is undone here. Tensors are dequantized when they are
read, a few rows at a time, from positioned reads: nothing is mapped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.header import TensorInfo, pread_into
from lowbit.errors import SourceError, one_line

if TYPE_CHECKING:
    from torch import Tensor

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# what splits text before BPE, by `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")
# `tokenizer.ggml.token_type`
CONTROL, USER_DEFINED = 3, 4
# fp32 values held at a time while a tensor is dequantized
CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class GgufInfo(TensorInfo):
    """A tensor as fp16 (shape, nbytes) and where its quantized rows are.

    kind: gguf's GGMLQuantizationType.  row_bytes: bytes of one stored row.
    heads: number of heads whose rows the converter interleaved, 0 for none.
    """

    kind: Any = None
    row_bytes: int = 0
    heads: int = 0


@dataclass(frozen=True)
class GgufModel:
    tensors: list[GgufInfo]
    config: dict[str, Any]
    texts: dict[str, str]


def read_gguf(path: Path) -> GgufModel:
    """Return tensors, config.json and the other side files (name -> text) of a GGUF file.

    Raises SourceError if the file is cut short, or for an architecture, tensor or tokenizer not known here.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise SourceError(f"{path}: reading GGUF needs `pip install 'lowbit[gguf]'`") from None
    size = path.stat().st_size
    try:
        reader = GGUFReader(str(path))
        meta = {key: field.contents() for key, field in reader.fields.items()}
    # numpy's complaint about views beyond the end of the mapped file, or about nonsense lengths
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as e:
        raise SourceError(f"{path}: not a GGUF file, or cut short ({e}); download it again") from None
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise SourceError(
            f"{path}: GGUF of architecture {architecture!r}; only llama is known, use its original"
        )
    if meta.get("split.count", 1) > 1:
        raise SourceError(
            f"{path}: one of {meta['split.count']} parts; merge them with llama-gguf-split first"
        )
    if meta.get("llama.expert_count", 0):
        raise SourceError(
            f"{path}: a mixture of experts; only dense llama is known as GGUF, use its original"
        )
    if meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in {
        t.name for t in reader.tensors
    }:
        raise SourceError(f"{path}: scaled rotary embeddings are not known in GGUF; use the original model")
    try:
        tensors = [_describe(path, size, meta, tensor) for tensor in reader.tensors]
        config = _config(meta, tensors)
    except KeyError as e:
        raise SourceError(f"{path}: metadata {e} is missing; download it again") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as e:
        raise SourceError(f"{path}: its metadata cannot be right ({e}); download it again") from None
    try:
        texts = _tokenizer_files(path, meta, config)
    except SourceError:
        raise
    except KeyError as e:
        raise SourceError(f"{path}: metadata {e} is missing; download it again") from None
    # whatever a library of its own makes of a vocabulary that is damaged
    except Exception as e:
        reason = one_line(e)
        raise SourceError(f"{path}: its tokenizer cannot be used ({reason}); download it again") from None
    return GgufModel(sorted(tensors, key=lambda t: t.offset), config, texts)


def _describe(path: Path, size: int, meta: dict[str, Any], tensor: Any) -> GgufInfo:
    name = TOP_NAMES.get(tensor.name)
    heads, kind = 0, ""
    if name is None:
        parts = tensor.name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in HF_NAMES:
            raise SourceError(f"{path}: tensor {tensor.name} is not known in llama; use the original model")
        _, layer, kind, suffix = parts
        name = f"model.layers.{layer}.{HF_NAMES[kind]}.{suffix}"
        heads = {
            "attn_q": meta["llama.attention.head_count"],
            "attn_k": meta.get("llama.attention.head_count_kv", meta["llama.attention.head_count"]),
        }.get(kind, 0)
    start, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    if start + nbytes > size:
        raise SourceError(f"{path}: cut short at {size} bytes: {tensor.name} ends at {start + nbytes}")
    # GGUF lists dimensions fastest first
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if kind in ("attn_q", "attn_k") and (type(heads) is not int or heads < 1 or shape[0] % (2 * heads)):
        raise SourceError(
            f"{path}: tensor {tensor.name} of {shape[0]} rows has {heads} heads; download it again"
        )
    values = 1
    for n in shape:
        values *= n
    return GgufInfo(
        name=name,
        dtype="F16",
        shape=shape,
        nbytes=2 * values,
        file=str(path),
        offset=start,
        kind=tensor.tensor_type,
        row_bytes=nbytes // (values // shape[-1]),
        heads=heads,
    )


def read_gguf_tensor(fd: int, info: GgufInfo) -> Tensor:
    """Return the fp16 tensor, dequantized by the gguf package CHUNK_VALUES values at a time."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    columns = info.shape[-1]
    rows = info.nbytes // 2 // columns
    out = np.empty((rows, columns), dtype=np.float16)
    step = max(1, CHUNK_VALUES // columns)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        stored = np.empty((last - first, info.row_bytes), dtype=np.uint8)
        pread_into(fd, stored.reshape(-1), info.offset + first * info.row_bytes, info.file)
        out[first:last] = dequantize(_as_stored(stored, info.kind), info.kind)
    if info.heads:
        out = unpermute(out.reshape(info.shape[0], -1), info.heads)
    return torch.from_numpy(out).reshape(info.shape)


def _as_stored(rows: Any, kind: Any) -> Any:
    """Return rows of bytes as gguf's dequantize wants them: floats typed, blocks as bytes."""
    import numpy as np

    float_types = {"F32": np.float32, "F16": np.float16}
    return rows.view(float_types[kind.name]) if kind.name in float_types else rows


def unpermute(weight: Any, heads: int) -> Any:
    """Return [N, K] rows of q or k in Hugging Face's order: each head's even rows, then its odd ones."""
    n, k = weight.shape
    return weight.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k).copy()


def _config(meta: dict[str, Any], tensors: list[GgufInfo]) -> dict[str, Any]:
    """Return config.json: what the metadata says, in the names of transformers' LlamaConfig."""
    shapes = {t.name: t.shape for t in tensors}
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    eps = meta["llama.attention.layer_norm_rms_epsilon"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": meta.get("llama.attention.key_length", hidden // heads),
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        # stored as fp32: 1e-5 comes back as 9.9999997e-06
        "rms_norm_eps": float(f"{eps:.7g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(meta.get("llama.rope.freq_base", 1e4)),
        },
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
    }
    return config | _special_ids(meta)


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: token for name, token in ids.items() if token is not None}


def _tokenizer_files(path: Path, meta: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json, generation_config.json, maybe chat_template.jinja."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(f"gpt2/{name}" for name in PRE_TOKENIZERS)
        raise SourceError(
            f"{path}: GGUF tokenizer {kind}/{pre} is not known ({known}); use the original model"
        )
    pieces, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words]),
        "gpt-2": gpt2_words,
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), bytes_only]
        ),
    }[pre]
    tokenizer.decoder = decoders.ByteLevel()
    special = [piece for piece, t in zip(pieces, types, strict=True) if t == CONTROL]
    added = [piece for piece, t in zip(pieces, types, strict=True) if t == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in added])
    names = {key: pieces[token] for key, token in _special_ids(meta).items()}
    if meta.get("tokenizer.ggml.add_bos_token"):
        bos = names["bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, config["bos_token_id"])]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **{key.removesuffix("_id"): piece for key, piece in names.items()},
    }
    if "tokenizer.ggml.unknown_token_id" in meta:
        settings["unk_token"] = pieces[meta["tokenizer.ggml.unknown_token_id"]]
    texts = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(_special_ids(meta), indent=2) + "\n",
    }
    if template := meta.get("tokenizer.chat_template"):
        texts["chat_template.jinja"] = template
    return texts


def write_side_files(model: GgufModel, folder: Path) -> list[Path]:
    """Write config.json and the side files to folder; return the side files (without config.json)."""
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    paths = []
    for name, text in model.texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
