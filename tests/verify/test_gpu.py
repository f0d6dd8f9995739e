"""verify, eval and generate on a GPU find and measure what they do on a CPU, with the kernels of a GPU."""

import json
import shutil

import pytest
import torch
from faults import FAULTS

from lowbit import evaluate, generate, pipeline, runtime, verify
from lowbit.folder import DenseView, open_folder
from lowbit.recipe import Recipe

pytestmark = pytest.mark.gpu

TEXT = " ".join(f"line {i}: the quick brown fox jumps over {i} lazy dogs by the sea shore" for i in range(60))
OUTPUTS = {
    "ct": {"group": 64},
    "ct asym": {"group": 64, "sym": False},
    "ct 8 bits": {"bits": 8, "group": -1},
    "gptq-v2": {"format": "gptq-v2", "sym": False},
    "awq": {"format": "awq", "sym": False},
}


@pytest.fixture(scope="module")
def outputs(build_llama, tmp_path_factory):
    """A function of a name in OUTPUTS: (source, output quantized on the GPU)."""
    source = build_llama(tie_word_embeddings=False)
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("gpu") / "out"
            recipe = Recipe(**({"method": "rtn", "device": "cuda"} | OUTPUTS[name]))
            pipeline.quantize(source, made[name], recipe)
        return source, made[name]

    return make


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_good_output_is_accepted_with_the_errors_of_the_cpu(outputs, name):
    source, folder = outputs(name)
    report = verify.verify(folder, source, device="cuda")
    assert report.ok, report.failures
    assert set(report.checks.values()) == {"ok"}
    on_cpu = {layer.name: layer.errors for layer in verify.verify(folder, source, device="cpu").layers}
    assert len(report.layers) == 14
    for layer in report.layers:
        for key in ("weight_error", "output_error", "step_error"):
            assert layer.errors[key] == pytest.approx(on_cpu[layer.name][key], rel=1e-4)
        # fp16 activations round in the kernel and nowhere else
        assert 0 < layer.errors["kernel_error"] < 1e-3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_numbers(outputs, tmp_path, fault):
    plant, _, named, zero_points = FAULTS[fault]
    source, good = outputs("ct asym" if zero_points else "ct")
    folder = shutil.copytree(good, tmp_path / "out")
    plant(folder)
    report = verify.verify(folder, source, hash=False, forward=False, device="cuda")
    assert any(named in str(found) for found in report.failures), report.failures


def test_eval_scores_as_on_the_cpu(outputs, tmp_path):
    source, folder = outputs("ct")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = {"text": [text], "window": 64, "max_tokens": 512}
    ours, theirs = (
        evaluate.evaluate(folder, source, **options, device=name).total for name in ("cuda", "cpu")
    )
    # bfloat16 on the GPU, fp32 on the CPU
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=0.02)
    assert ours.kl_mean == pytest.approx(theirs.kl_mean, rel=0.25)
    alone = evaluate.evaluate(folder, folder, **options, device="cuda").total
    assert (alone.kl_mean, alone.kl_p99, alone.top1) == (0, 0, 1)


@pytest.mark.parametrize("name", ["ct", "awq"])
def test_the_packed_model_gives_the_logits_of_the_decoded_one(outputs, name):
    """What generate runs on a GPU, against the second decoding route in fp32."""
    _, folder = outputs(name)
    ids = torch.tensor([[5, 9, 2, 77, 31]])
    with torch.no_grad():
        packed = runtime.load(folder, device="cuda")(input_ids=ids.cuda()).logits.float().cpu()
        dense = evaluate.load_model(DenseView(open_folder(folder)), torch.device("cpu")).model
        want = dense(input_ids=ids).logits
    assert float((packed - want).norm() / want.norm()) < 0.02


def test_generate_runs_beside_the_source(outputs):
    source, folder = outputs("ct")
    found = generate.generate(folder, "the quick brown fox", source, max_new_tokens=8, device="cuda")
    assert found.text
    assert found.source_text
    assert json.loads(json.dumps(found.to_json()))["prompt"] == "the quick brown fox"
