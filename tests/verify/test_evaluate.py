"""eval against plain loops over whole models in float64, and a model against itself."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GPT2Config, MixtralConfig

from lowbit import evaluate, pipeline, verify
from lowbit.ahead import workers
from lowbit.decode import dequantize
from lowbit.errors import RecipeError, SourceError
from lowbit.folder import DenseView, open_folder
from lowbit.recipe import Recipe

TEXT = " ".join(
    f"line {i}: the quick brown fox jumps over {i} lazy dogs and sells sea shells by the shore"
    for i in range(90)
)


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {
    "gemma2": Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=16, vocab_size=128),
    "mixtral": MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4, vocab_size=128),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=128),
}


@pytest.fixture(scope="module")
def model(build_llama):
    return build_llama(dtype="float16", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "out"
    pipeline.quantize(model, out, Recipe(method="rtn", group=64, bits=4))
    return out


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text(TEXT)
    return file


def naive_logits(folder, rows, dense=None):
    """Logits of whole rows by transformers' own loader, in float64; dense replaces weights by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, weight in (dense or {}).items():
        model.get_parameter(name).data.copy_(weight)
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits[0] for row in rows]


def naive_rows(folder, window, stride, bos):
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    step = window - 1 if bos else window
    return [([0] if bos else []) + ids[at : at + step] for at in range(0, len(ids) - step + 1, stride)]


@pytest.mark.parametrize(("stride", "bos"), [(64, False), (16, False), (64, True), (16, True)])
def test_perplexity_is_that_of_a_loop_over_tokens(model, text, stride, bos):
    report = evaluate.evaluate(model, text=[text], window=64, stride=stride, bos=bos, max_tokens=10**9)
    rows = naive_rows(model, 64, stride, bos)
    losses = []
    for row, logits in zip(rows, naive_logits(model, rows), strict=True):
        for place in range(64 - min(stride, 63), 64):
            weights = logits[place - 1].exp()
            losses.append(-math.log(weights[row[place]] / weights.sum()))
    assert report.total.tokens == len(losses)
    assert report.total.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    # a window that begins one token later is another protocol, and shows
    shifted = naive_rows(model, 64, stride, bos)[0][1:]
    assert shifted != rows[0][: len(shifted)]


def test_divergence_from_the_source_is_that_of_its_definition(model, quantized, text):
    report = evaluate.evaluate(quantized, model, [text], window=64, bos=False, max_tokens=10**9)
    folder = open_folder(quantized)
    view = DenseView(folder, torch.float64)
    dense = {f"{name}.weight": view.read(f"{name}.weight") for name in folder.layers}
    rows = naive_rows(model, 64, 64, False)
    kl, same = [], []
    for p, q in zip(naive_logits(model, rows), naive_logits(model, rows, dense), strict=True):
        for place in range(63):
            a, b = p[place].softmax(0), q[place].softmax(0)
            kl.append(float((a * (a / b).log()).sum()))
            same.append(float(a.argmax() == b.argmax()))
    assert report.total.kl_mean == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert report.total.kl_p99 == pytest.approx(sorted(kl)[round(0.99 * (len(kl) - 1))], rel=0.05)
    assert report.total.top1 == pytest.approx(sum(same) / len(same), abs=2 / len(same))
    assert report.total.kl_mean > 0


def test_a_model_does_not_diverge_from_itself(quantized, text):
    report = evaluate.evaluate(quantized, quantized, [text], window=64, max_tokens=512)
    assert (report.total.kl_mean, report.total.kl_p99, report.total.top1) == (0, 0, 1)
    assert report.total.perplexity == report.total.source_perplexity


def test_domains_are_scored_apart_and_together(model, text, tmp_path):
    other = tmp_path / "two.txt"
    other.write_text(TEXT[::-1])
    report = evaluate.evaluate(model, text=[text, other], window=64, max_tokens=1024)
    assert list(report.domains) == ["one", "two"]
    alone = evaluate.evaluate(model, text=[other], window=64, max_tokens=512)
    assert report.domains["two"].perplexity == alone.total.perplexity
    logs = [s.tokens * math.log(s.perplexity) for s in report.domains.values()]
    assert math.log(report.total.perplexity) == pytest.approx(sum(logs) / report.total.tokens, rel=1e-9)
    saved = json.loads(report.save(tmp_path).read_text())
    assert saved["total"]["tokens"] == report.total.tokens


def test_blocks_loaded_one_at_a_time_give_the_same_numbers(quantized, monkeypatch, text):
    whole = evaluate.evaluate(quantized, text=[text], window=64, max_tokens=512)
    monkeypatch.setattr(evaluate, "usable_memory", lambda device: 0)
    held = []
    unload = evaluate.unload

    def watched(model, names):
        held.append(sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and not p.is_meta))
        unload(model, names)

    monkeypatch.setattr(evaluate, "unload", watched)
    streamed = evaluate.evaluate(quantized, text=[text], window=64, max_tokens=512)
    assert streamed.total == whole.total
    # hidden 256, intermediate 512, two key/value heads of four: one block and never two
    block = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512 + 2 * 256
    assert set(held) == {block}


@pytest.mark.parametrize("architecture", ["llama", "tied llama", "gemma2", "mixtral", "gpt2"])
def test_streamed_matrices_give_the_same_logits(build_llama, tmp_path, architecture):
    """Matrices read from the files a few rows at a time, and the same model loaded whole."""
    if "llama" in architecture:
        source = build_llama(tie_word_embeddings="tied" in architecture)
    else:
        source = tmp_path / "source"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(SMALL[architecture]).save_pretrained(source)
    pipeline.quantize(source, tmp_path / "out", Recipe(method="rtn", group=32))
    weights, ids = DenseView(open_folder(tmp_path / "out")), torch.tensor([[3, 1, 4, 1, 5]])
    with workers() as pool, torch.no_grad():
        streamed = evaluate.load_model(weights, torch.device("cpu"), stream=pool).model
        whole = evaluate.load_model(weights, torch.device("cpu")).model
        matrices = [module for module in streamed.modules() if type(module).__name__ == "StreamedLinear"]
        logits, want = streamed(input_ids=ids).logits, whole(input_ids=ids).logits
    assert matrices
    assert all(module.weight.is_meta for module in matrices)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
    assert float(want.std()) > 0


def test_evenly_spaced_windows_reach_both_ends():
    rows = evaluate.cut(torch.arange(1000), 10, 10, 5)
    assert rows[:, 0].tolist() == [0, 250, 500, 740, 990]
    assert evaluate.cut(torch.arange(9), 10, 10, 5).shape == (0, 10)


def test_the_shipped_text_is_used_without_one(model):
    report = evaluate.evaluate(model, window=64, max_tokens=256)
    assert list(report.domains) == ["novels", "technical", "jargon", "commentary"]


def test_text_that_is_missing_or_too_short_is_refused(model, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(SourceError, match=r"short: .* tokens do not fill a window of 512"):
        evaluate.evaluate(model, text=[short])
    with pytest.raises(SourceError, match=r"none\.txt"):
        evaluate.evaluate(model, text=[tmp_path / "none.txt"])


def test_a_damaged_folder_is_not_scored(quantized, tmp_path, text):
    folder = shutil.copytree(quantized, tmp_path / "out")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(SourceError, match="cut short"):
        evaluate.evaluate(folder, text=[text])


@pytest.mark.parametrize("keys", [{"format": "gptq"}, {"format": "awq", "sym": False}, {"bits": 8}], ids=str)
def test_every_format_is_read_as_it_was_meant(build_llama, tmp_path, text, keys):
    """The same grid in another format scores the same as in compressed-tensors."""
    source = build_llama(dtype="float16", tie_word_embeddings=True)
    scores = []
    for name, format in (("one", "compressed-tensors"), ("two", keys.get("format", "compressed-tensors"))):
        pipeline.quantize(source, tmp_path / name, Recipe(**({"method": "rtn"} | keys | {"format": format})))
        scores.append(evaluate.evaluate(tmp_path / name, source, [text], window=64, max_tokens=256).total)
    assert scores[0] == scores[1]
    assert scores[0].kl_mean < 0.1
    folder = open_folder(tmp_path / "two")
    assert not dequantize.__module__.startswith("lowbit_kernels")
    assert len(folder.layers) == 14


def test_conv1d_weights_come_back_the_way_the_model_holds_them(model, tmp_path, text):
    """GPT-2 stores [in, out]; the files hold [out, in]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    source = tmp_path / "gpt2"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=128)
        GPT2LMHeadModel(config).save_pretrained(source)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, source)
    pipeline.quantize(source, tmp_path / "out", Recipe(method="rtn", bits=8, group=32))
    report = evaluate.evaluate(tmp_path / "out", source, [text], window=64, max_tokens=256)
    assert report.total.kl_mean < 1e-4
    assert verify.verify(tmp_path / "out", source).checks["forward"] == "ok"


def test_a_config_of_another_size_is_refused(quantized, tmp_path, text):
    folder = shutil.copytree(quantized, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(
        SourceError, match=r"mlp.* is \[(512, 256|256, 512)\], config.json asks for \[256, 256\]"
    ):
        evaluate.evaluate(folder, text=[text])


def test_a_window_longer_than_the_model_is_refused(model, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 8)
    with pytest.raises(RecipeError, match=r"4096 tokens are more than the model's 2048 positions"):
        evaluate.evaluate(model, text=[long], window=4096)
