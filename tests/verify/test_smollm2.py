"""eval of a real model, SmolLM2-135M in fp16, against transformers alone by the protocol that eval states."""

import math
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowbit import evaluate, pipeline
from lowbit.recipe import Recipe

WINDOW, WINDOWS = 256, 3


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, tmp_path_factory) -> Path:
    """A folder of the model in fp16, read from the GGUF file by transformers."""
    folder, file = tmp_path_factory.mktemp("smollm2"), smollm2_gguf
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float16)
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings)).half()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prose() -> Path:
    return Path(str(resources.files("lowbit") / "data" / "eval" / "novels.txt"))


def test_perplexity_is_that_of_transformers_to_four_digits(smollm2, prose):
    """Windows of 256 tokens, stride 256, no BOS (as this tokenizer), three of them evenly spaced."""
    report = evaluate.evaluate(smollm2, text=[prose], window=WINDOW, max_tokens=WINDOW * WINDOWS)
    ids = AutoTokenizer.from_pretrained(smollm2)(prose.read_text(), add_special_tokens=False).input_ids
    full = len(ids) // WINDOW
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    loss, tokens = 0.0, 0
    for window in (0, round((full - 1) / 2), full - 1):
        row = torch.tensor([ids[window * WINDOW : (window + 1) * WINDOW]])
        with torch.no_grad():
            # transformers' own loss: the mean over the tokens that have one before them
            loss += float(model(input_ids=row, labels=row).loss) * (WINDOW - 1)
        tokens += WINDOW - 1
    assert report.total.tokens == tokens
    assert report.total.perplexity == pytest.approx(math.exp(loss / tokens), rel=5e-5)
    # a trained model on English, not noise
    assert 10 < report.total.perplexity < 60


def test_the_model_and_its_quantized_self_do_not_diverge_from_themselves(smollm2, prose, tmp_path):
    pipeline.quantize(smollm2, tmp_path / "out", Recipe(method="rtn"))
    options = {"text": [prose], "window": 128, "max_tokens": 256}
    for folder in (smollm2, tmp_path / "out"):
        total = evaluate.evaluate(folder, folder, **options).total
        assert (total.kl_mean, total.kl_p99, total.top1) == (0, 0, 1)
    # and the quantized one does from the original
    assert evaluate.evaluate(tmp_path / "out", smollm2, **options).total.kl_mean > 0.05
