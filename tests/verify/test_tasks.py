"""lm_eval's tasks on our models, where it is installed: what it would measure on transformers' own."""

import json
import random

import pytest
import torch

from lowbit import evaluate, pipeline, tasks
from lowbit.errors import RecipeError
from lowbit.recipe import Recipe

QUESTIONS = [
    ("the quick brown", [" fox", " shells", " matrix"], 0),
    ("she sells sea", [" oak", " shells", " dog"], 1),
    ("the matrix was", [" lazy", " wise", " dense"], 2),
]
YAML = """
task: small_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task(tmp_path):
    for name in tasks.NEEDS:
        pytest.importorskip(name, reason=f"pip install {name}")
    rows = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.yaml").write_text(YAML.format(file=tmp_path / "rows.jsonl"))
    return str(tmp_path / "small.yaml")


def test_a_task_scores_as_a_loop_over_its_choices(build_llama, tmp_path, task):
    """acc is how often the right choice has the highest likelihood after the question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = build_llama(dtype="float16")
    pipeline.quantize(source, tmp_path / "out", Recipe(method="rtn", group=64))
    before = random.getstate()
    report = evaluate.evaluate(tmp_path / "out", source, window=64, max_tokens=64, tasks=[task])
    assert random.getstate() == before
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    right = 0
    for question, choices, answer in QUESTIONS:
        scores = []
        for choice in choices:
            start = len(tokenizer(question).input_ids)
            ids = torch.tensor([tokenizer(question + choice).input_ids])
            with torch.no_grad():
                logs = model(input_ids=ids).logits[0].log_softmax(-1)
            scores.append(sum(float(logs[at - 1, ids[0, at]]) for at in range(start, ids.shape[1])))
        right += scores.index(max(scores)) == answer
    assert report.source_tasks["small_choices"]["acc"] == pytest.approx(right / len(QUESTIONS))
    assert 0 <= report.tasks["small_choices"]["acc"] <= 1


def test_a_task_that_nobody_knows_is_one_line(task):
    with pytest.raises(RecipeError, match=r"--tasks no_such_task_1: lm_eval cannot load it"):
        tasks.load_tasks([task, "no_such_task_1"])


@pytest.mark.parametrize(
    ("there", "install"),
    [((), "lm_eval accelerate"), (("lm_eval",), "accelerate"), (("accelerate",), "lm_eval")],
)
def test_without_what_it_needs_it_says_how_to_install_it(monkeypatch, there, install):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(RecipeError, match=f"run `pip install {install}`"):
        tasks.load_tasks(["arc_easy"])


def test_a_limit_of_examples_without_tasks_is_refused(build_llama):
    with pytest.raises(RecipeError, match="--limit counts examples of --tasks"):
        evaluate.evaluate(build_llama(), limit=8)
