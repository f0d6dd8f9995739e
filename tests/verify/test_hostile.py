"""Folders that are damaged on purpose: commands say what is wrong in one line; none waits or crashes."""

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lowbit import evaluate, inspection, pipeline, report, verify
from lowbit.convert import convert
from lowbit.errors import LowbitError, OutputError
from lowbit.folder import EVALUATION, KERNELS
from lowbit.generate import generate
from lowbit.recipe import Recipe

TABLE = {"device": "x", "arch": "sm_90", "date": "", "rows": 3}
SCORES = {"tokens": 3, "perplexity": "much"}


@pytest.fixture(scope="module")
def good(build_llama, tmp_path_factory) -> dict[str, Path]:
    source, made = build_llama(), {}
    for format, keys in {"compressed-tensors": {}, "gptq": {}, "awq": {"sym": False}}.items():
        made[format] = tmp_path_factory.mktemp("good") / "out"
        pipeline.quantize(source, made[format], Recipe(method="rtn", group=64, format=format, **keys))
    return made


def edit(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(change(document) or document))

    return plant


def config(**keys: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda document: document.update(keys))


def quantization(**keys: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda document: document["quantization_config"].update(keys))


def weights(**keys: Any) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        document["quantization_config"]["config_groups"]["group_0"]["weights"].update(keys)

    return edit("config.json", change)


def pipe(file: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return plant


def write(file: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(text) and None


# fault -> (format, what plants it, what verify says of it)
FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "weights are a pipe": ("gptq", pipe("model.safetensors"), "model.safetensors: is not a regular file"),
    "manifest is a pipe": ("gptq", pipe("lowbit.json"), "lowbit.json: is not a regular file"),
    "tokenizer is a pipe": ("gptq", pipe("tokenizer.json"), "tokenizer.json: is not a regular file"),
    "no weights": ("gptq", lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "architectures of text": ("gptq", config(architectures="Llama"), "architectures is"),
    "text_config of a number": ("gptq", config(text_config=3), "text_config is 3, expected dict"),
    "size of text": ("gptq", config(num_hidden_layers="two"), "num_hidden_layers is"),
    "awq of 3 bits": ("awq", quantization(bits=3), "awq holds 4 bits, not 3"),
    "awq that keeps a number": ("awq", quantization(modules_to_not_convert=[3]), "no list of names"),
    "gptq in marlin's layout": ("gptq", quantization(checkpoint_format="marlin"), "'marlin' is not gptq"),
    "nvfp4": ("compressed-tensors", quantization(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
    "a target that is no expression": ("compressed-tensors", quantization(ignore=["re:("]), "re:("),
    "a grid of a list": (
        "compressed-tensors",
        weights(symmetric=[[]]),
        "symmetric is [[]]; it is true or false",
    ),
    "bits of 4.0": ("gptq", quantization(bits=4.0), "bits 4.0 is not supported"),
    "awq with zero-points of text": ("awq", quantization(zero_point="no"), "zero_point is 'no'"),
    "manifest without a seed": (
        "gptq",
        edit("lowbit.json", lambda m: m.pop("seed") and None),
        "lowbit.json: seed",
    ),
    "an error that was not recorded": (
        "gptq",
        edit("lowbit.json", lambda m: m["layers"][0]["errors"].pop("snr_db") and None),
        "lowbit.json: layers.0.errors",
    ),
    "another method": ("gptq", quantization(quant_method="bitsandbytes"), "config.json: quant_method"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_command_answers_in_one_line(good, tmp_path, fault):
    format, plant, said = FAULTS[fault]
    folder = shutil.copytree(good[format], tmp_path / "out")
    plant(folder)
    try:
        outcome = verify.verify(folder, hash=False)
        assert not outcome.ok
        found = "\n".join(map(str, outcome.failures))
    except LowbitError as e:
        found = str(e)
    assert said in found
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    for command in (
        lambda: evaluate.evaluate(folder, text=[text], window=16, max_tokens=16),
        lambda: convert(folder, "gptq-v2", tmp_path / "converted"),
    ):
        with pytest.raises(LowbitError) as refusal:
            command()
        assert "\n" not in str(refusal.value)
    # these two show what there is
    for command in (lambda: inspection.inspect(folder, kernels=True), lambda: report.report(folder)):
        with suppress(LowbitError):
            command()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (KERNELS, json.dumps(TABLE)),
        (KERNELS, "[]"),
        (KERNELS, json.dumps(TABLE | {"rows": [{"us": 1.0}]})),
        (EVALUATION, json.dumps({"total": 3})),
        (EVALUATION, "[]"),
        (EVALUATION, json.dumps({"total": SCORES, "domains": {}})),
    ],
)
def test_a_report_names_the_file_that_it_cannot_use(good, tmp_path, file, text):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    (folder / file).write_text(text)
    with pytest.raises(LowbitError, match=file):
        report.report(folder)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 1}),
        ("tokenizer_config.json", {"bos_token": [1]}),
        ("tokenizer_config.json", {"model_max_length": []}),
        ("config.json", {"hidden_act": 3}),
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("generation_config.json", {"bos_token_id": 2.5}),
        ("generation_config.json", {"output_hidden_states": "x"}),
        ("generation_config.json", {"num_beams": "two"}),
    ],
    ids=str,
)
def test_side_files_of_wrong_types_are_named(good, tmp_path, file, keys):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    edit(file, lambda document: document.update(keys))(folder)
    with pytest.raises(LowbitError, match=re.escape(str(folder))) as refusal:
        generate(folder, "the quick", max_new_tokens=1, device="cpu")
    assert "\n" not in str(refusal.value)


def test_numbers_of_heads_that_are_lists_do_not_stop_inspect(good, tmp_path):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    config(num_attention_heads=[4, 4], num_key_value_heads={"a": 1})(folder)
    assert inspection.inspect(folder).tensor_parallel >= 1


def test_a_source_of_a_name_that_no_file_can_have(good, tmp_path):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    edit("lowbit.json", lambda document: document["source"].update(name="a" * 300))(folder)
    assert verify.verify(folder, forward=False).source is None


def test_a_folder_is_not_converted_into_itself(good):
    with pytest.raises(OutputError, match="inside"):
        convert(good["gptq"], "gptq-v2", good["gptq"] / "sub" / "v2")
    assert not (good["gptq"] / "sub").exists()


@pytest.mark.parametrize("name", [KERNELS, "README.md"])
def test_texts_that_are_not_utf8_are_converted(good, tmp_path, name):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    (folder / name).write_bytes(b"\xff" + (folder / name).read_bytes())
    convert(folder, "gptq-v2", tmp_path / "converted")
    assert verify.verify(tmp_path / "converted").ok


def test_a_page_that_cannot_be_written_leaves_the_one_before(good, tmp_path):
    """A file of a size limit that writing exceeds; 16 KiB are less than any page."""
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    page = report.report(folder)
    before, kept = page.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, kept[1]))
    try:
        for place in (page, tmp_path / "other.html"):
            with pytest.raises(OutputError, match=f"{place.name}: not written"):
                report.report(folder, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert page.read_bytes() == before
    assert not (tmp_path / "other.html").exists()
    assert not [file for file in (*folder.iterdir(), *tmp_path.iterdir()) if file.name.startswith(".")]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "lowbit.json", "README.md"])
def test_a_page_takes_no_other_file_s_place(good, tmp_path, name):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    before = (folder / name).read_bytes()
    with pytest.raises(OutputError, match=name):
        report.report(folder, folder / name)
    assert (folder / name).read_bytes() == before
    assert report.report(folder, folder / "mine.html") == report.report(folder, folder / "mine.html")


def test_a_text_without_an_end_is_refused(good):
    with pytest.raises(LowbitError, match="/dev/zero: a device"):
        evaluate.evaluate(good["gptq"], text=["/dev/zero"])


def test_a_page_may_go_to_a_link_or_a_device(good, tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    report.report(good["gptq"], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    report.report(good["gptq"], "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_converted_folder_has_no_results_of_the_one_before(good, tmp_path):
    folder = shutil.copytree(good["gptq"], tmp_path / "out")
    for name in ("report.html", EVALUATION):
        (folder / name).write_text("{}")
    convert(folder, "gptq-v2", tmp_path / "converted")
    assert not {"report.html", EVALUATION} & {file.name for file in (tmp_path / "converted").iterdir()}
    assert verify.verify(tmp_path / "converted").ok
