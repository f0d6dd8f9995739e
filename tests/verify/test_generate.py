"""generate: the decoded model continues as transformers itself does."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit import generate, pipeline
from lowbit.errors import LowbitError
from lowbit.folder import DenseView, open_folder
from lowbit.recipe import Recipe

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def models(build_llama, tmp_path_factory):
    source = build_llama(dtype="float16")
    out = tmp_path_factory.mktemp("generate") / "out"
    pipeline.quantize(source, out, Recipe(method="rtn", group=64))
    return source, out


def continued(folder, prompt, dense=None):
    """Greedy continuation by transformers, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in (dense or {}).items():
        model.get_parameter(name).data.copy_(weight)
    ids = tokenizer(prompt).input_ids
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 8 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_both_models_continue_as_they_should(models):
    source, out = models
    view = DenseView(open_folder(out))
    dense = {f"{name}.weight": view.read(f"{name}.weight") for name in view.folder.layers}
    found = generate.generate(out, PROMPT, source, max_new_tokens=8)
    assert found.source_text == continued(source, PROMPT)
    assert found.text == continued(source, PROMPT, dense)


def test_the_chat_template_is_used_when_asked(models):
    source, _ = models
    plain = generate.generate(source, PROMPT, max_new_tokens=4)
    chat = generate.generate(source, PROMPT, max_new_tokens=4, chat=True)
    assert chat.text == generate.generate(source, f"<s>user: {PROMPT}</s>", max_new_tokens=4).text
    assert plain.source_text is None


def test_a_text_is_cut_at_the_limit_and_not_by_its_own_end(models):
    source, _ = models
    assert generate.generate(source, PROMPT, source, max_new_tokens=2).source_cut
    # the next token that greedy decoding gives is declared to be the end
    ids = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    first = int(model(input_ids=ids).logits[0, -1].argmax())
    settings = source / "generation_config.json"
    before = settings.read_text()
    settings.write_text(json.dumps(json.loads(before) | {"eos_token_id": [first]}))
    try:
        assert not generate.generate(source, PROMPT, max_new_tokens=1).cut
    finally:
        settings.write_text(before)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "no tokens"),
        ("bad \udcff byte", {}, "not UTF-8"),
        (PROMPT, {"max_new_tokens": 4000}, "more than the model's 2048 positions"),
        (PROMPT, {"chat": True}, "no usable chat template"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_line(models, tmp_path, prompt, options, said):
    _, out = models
    folder = shutil.copytree(out, tmp_path / "out")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only\\nfor adults') }}")
    with pytest.raises(LowbitError, match=said) as refusal:
        generate.generate(folder, prompt, **options)
    assert "\n" not in str(refusal.value)
