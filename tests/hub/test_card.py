"""The model card: the source's metadata survives as it was written, and what is added is true."""

from __future__ import annotations

import copy
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from lowbit.hub import model_card

SOURCE_README = """---
license: apache-2.0   # as the weights
language: no
base_model: org/older
tags:
  - chat
extra_gated_fields: {Company: text}
---
# Original

Text of the base model.
"""

ROW = {
    "name": "model.layers.0.mlp.up_proj",
    "shape": [512, 256],
    "scheme": {"bits": 4, "group_size": 128, "symmetric": True, "scale_dtype": "float16"},
    "method": "gptq",
    "packed_bytes": 65536 + 2048,
    "errors": {"weight_error": 0.1, "output_error": 0.05},
    "fallback": None,
}


@pytest.fixture
def manifest():
    return {
        "lowbit": "0.1.0",
        "seed": 0,
        "recipe": {"bits": 4, "group": 128, "format": "compressed-tensors", "exclude": ()},
        "source": {"name": "org/model"},
        "layers": [copy.deepcopy(ROW)],
        "copied": [{"name": "lm_head.weight", "linear": True}, {"name": "norm.weight", "linear": False}],
    }


def metadata(card):
    return yaml.load(card.split("---\n")[1], Loader=yaml.BaseLoader)


def test_metadata_of_the_source_is_kept_to_the_letter(manifest):
    card = model_card(manifest, SOURCE_README)
    for line in SOURCE_README.split("---\n")[1].splitlines():
        assert line.startswith("base_model") or f"\n{line}\n" in card
    found = metadata(card)
    assert found["language"] == "no", "a YAML round trip makes false of Norwegian"
    assert found["license"] == "apache-2.0"
    assert found["base_model"] == "org/model"
    assert found["base_model_relation"] == "quantized"
    assert set(found["tags"]) == {"chat", "lowbit", "4-bit", "compressed-tensors"}
    assert "# Original\n\nText of the base model.\n" in card
    ModelCard(card).data.to_dict()


TAGS = {
    "block": "tags:\n- a\n- b\n",
    "indented": "x: 1\ntags:\n    - a\n    - b\nlicense: mit\n",
    "flow": "tags: [a, b]\nlicense: mit\n",
    "list of bases": "base_model:\n- o/x\n- o/y\ntags:\n- a\n- b\n",
    "already ours": "tags: [a, b, lowbit]\n",
}


@pytest.mark.parametrize("block", TAGS.values(), ids=TAGS)
def test_tags_are_added_in_every_way_to_write_a_list(manifest, block):
    found = metadata(model_card(manifest, f"---\n{block}---\n"))
    assert sorted(found["tags"]) == ["4-bit", "a", "b", "compressed-tensors", "lowbit"]
    before = yaml.load(block, Loader=yaml.BaseLoader)
    assert all(found[key] == before[key] for key in set(before) - {"tags", "base_model"})


def test_no_licence_is_invented(manifest):
    assert "license" not in metadata(model_card(manifest, None))
    assert "license" not in metadata(model_card(manifest, "# only text\n"))


def test_broken_metadata_becomes_text(manifest):
    card = model_card(manifest, "---\nlicense: [mit\n---\n# Original\n")
    assert metadata(card)["base_model"] == "org/model"
    assert "license: [mit" in card.split("## The card of the base model")[1]


def test_local_source_names_no_base_model_and_hides_the_path(manifest, tmp_path):
    manifest["source"]["name"] = str(tmp_path / "my-model")
    card = model_card(manifest, SOURCE_README)
    assert metadata(card)["base_model"] == "org/older"
    assert str(tmp_path) not in card
    assert "my-model" in card


def test_rules_that_transformers_does_not_read_send_gptq_to_its_own_loader(manifest):
    manifest["recipe"]["format"] = "gptq"
    assert "GPTQModel.load" not in model_card(manifest, None)
    other = copy.deepcopy(ROW) | {"name": "model.layers.0.mlp.down_proj"}
    other["scheme"]["group_size"] = 64
    assert "GPTQModel.load" in model_card(manifest | {"layers": [*manifest["layers"], other]}, None)
    dense = {"name": "model.layers.0.mlp.gate.weight", "linear": True}
    assert "GPTQModel.load" in model_card(manifest | {"copied": [dense]}, None)


def test_quality_shows_the_worst_layer_and_the_evaluation(manifest):
    manifest["layers"].append(
        copy.deepcopy(ROW) | {"name": "worse", "errors": {"weight_error": 0.375, "output_error": 0.25}}
    )
    manifest["layers"].append(copy.deepcopy(ROW) | {"name": "unmeasured", "errors": None})
    manifest["eval"] = {"perplexity": 17.25}
    card = model_card(manifest, None)
    assert "| relative weight error, worst layer (worse) | 0.375 |" in card
    assert "| perplexity | 17.25 |" in card
    # (65536 + 2048) bytes for 512 x 256 weights
    assert "4.12" in card


LOADING = [
    # format, scheme, layer name, must be said, must not be said
    ("compressed-tensors", "int4 sym g128", "mlp.up_proj", "vllm serve MODEL", "dequantize=True"),
    ("compressed-tensors", "int4 asym g64", "mlp.up_proj", "dequantize=True", "only symmetric"),
    (
        "compressed-tensors",
        "int4 asym g64",
        "mlp.experts.0.up_proj",
        "SGLang takes only symmetric",
        "dequantize",
    ),
    ("gptq", "int4 sym g128", "mlp.experts.0.up_proj", "Transformers does not load", "AutoModelForCausalLM"),
    ("gptq-v2", "int4 asym g128", "mlp.up_proj", "only symmetric GPTQ", "vllm serve"),
    ("compressed-tensors", "int3 sym g128", "mlp.up_proj", "no kernel for int3", "vllm serve"),
    ("awq", "int4 asym g128", "mlp.up_proj", "gptqmodel", "compressed-tensors>="),
]


@pytest.mark.parametrize(("format", "scheme", "name", "said", "unsaid"), LOADING)
def test_loading_advice_follows_what_the_engines_take(manifest, format, scheme, name, said, unsaid):
    manifest["recipe"]["format"] = format
    bits, kind, group = re.fullmatch(r"int(\d) (a?sym) g(\d+)", scheme).groups()
    scheme = {"bits": int(bits), "group_size": int(group), "symmetric": kind == "sym"}
    manifest["layers"][0] |= {"scheme": scheme, "name": f"model.layers.0.{name}"}
    card = model_card(manifest, None)
    assert said in card
    assert unsaid not in card
