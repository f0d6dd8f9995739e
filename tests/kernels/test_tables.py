"""Tables of measured configs: a wrong one must not choose a kernel, and the shipped one must still fit."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest

from lowbit_kernels import dispatch, hopper, resident, tables
from lowbit_kernels.dispatch import VARIANTS, KernelConfig, Problem, choose, rule
from lowbit_kernels.tables import SHIPPED, kernel_hash, read_table, shipped_configs, write_table
from lowbit_kernels.tuning import Shape, candidates, tune

PROBLEM = Problem(4, 128, False, "float16", 1, 4096, 4096, "sm_90", "fragment")
CONFIG = KernelConfig("decode", 8, 16, 128, split_k=2, num_warps=1)
STAMP = {"device": "Some GPU", "arch": "sm_90", "driver": "1", "torch": "2", "date": "2026-01-01"}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "lowbit_kernels.json"
    write_table(path, STAMP, [(PROBLEM, CONFIG, 7.123, 2.1e-4)])
    return path


def test_a_table_reads_back(table):
    configs, reason = read_table(table, "Some GPU")
    assert configs == {PROBLEM: CONFIG}
    assert reason is None


def edit(**values):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_row(path, part, **values):
    table = json.loads(path.read_text())
    table["rows"][0][part].update(values)
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (edit(device="Another GPU"), "Another GPU"),
        (edit(triton="0.1"), "0.1"),
        (edit(kernels="0123"), "0123"),
        (edit(rows=[{"problem": {"bits": 4}}]), "not a table"),
        (edit(rows=[{"problem": {}, "config": {"gone": 1}}], kernels="0123"), "run `lowbit tune` again"),
        (lambda path: change_row(path, "problem", bits="4"), "bits is '4'"),
        (lambda path: change_row(path, "config", split_k=2.0), "split_k is 2.0"),
        (lambda path: change_row(path, "config", dependent=1), "dependent is 1"),
        (lambda path: path.write_text("{"), "not a table"),
        (lambda path: path.write_text("[]"), "not a table"),
        (lambda path: path.unlink(), "No such file"),
    ],
    ids=[
        "foreign",
        "other Triton",
        "other kernels",
        "other fields",
        "fields of other kernels",
        "bits of text",
        "a split of 2.0",
        "a flag of 1",
        "cut off",
        "no object",
        "missing",
    ],
)
def test_a_table_that_does_not_fit_is_ignored_with_the_reason(table, damage, says):
    damage(table)
    configs, reason = read_table(table, "Some GPU")
    assert configs == {}
    assert reason is not None
    assert "\n" not in reason
    assert str(table) in reason
    assert says in reason


def test_comments_do_not_make_a_table_stale_and_code_does(tmp_path, monkeypatch):
    for name in ("device.py", "fragment.py", "hopper.py", "resident.py", "wna16.py"):
        (tmp_path / name).write_text('"""Doc."""\n\n\ndef kernel():\n    """Doc."""\n    return 1\n')
    monkeypatch.setattr(tables, "__file__", str(tmp_path / "tables.py"))
    before = kernel_hash.__wrapped__()
    (tmp_path / "fragment.py").write_text('"""Other."""\n\n\ndef kernel():\n    # one\n    return 1\n')
    assert kernel_hash.__wrapped__() == before
    (tmp_path / "fragment.py").write_text("def kernel():\n    return 2\n")
    assert kernel_hash.__wrapped__() != before


def test_the_name_of_the_kernels_is_the_same_in_every_python():
    # 3.12 gave functions type_params, 3.13 leaves empty lists out of ast.dump
    function = ["FunctionDef", ("name", "f"), ("args", ["arguments"]), ("body", [["Pass"]])]
    assert tables._plain(ast.parse("def f(): pass")) == ["Module", ("body", [function])]


def test_an_installed_table_decides(monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", {})
    odd = replace(PROBLEM, n=4097)
    assert choose(odd) == rule(odd) != CONFIG
    dispatch.install({odd: CONFIG})
    assert choose(odd) == CONFIG
    dispatch.install({odd: replace(CONFIG, variant="of another release")})
    assert choose(odd) == rule(odd)


def test_a_shipped_config_that_this_triton_cannot_run_is_not_taken(monkeypatch):
    table = json.loads((SHIPPED / "h200.json").read_text())
    gluon = {"hopper", "resident"}
    problems = [Problem(**row["problem"]) for row in table["rows"] if row["config"]["variant"] in gluon]
    assert problems
    for module in (hopper, resident):
        monkeypatch.setattr(module, "missing", lambda: "Triton 3.4.0 has no Gluon for Hopper")
    choose.cache_clear()
    try:
        assert {choose(problem).variant for problem in problems} <= {"decode", "gemm", "dense"}
    finally:
        choose.cache_clear()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_shipped_tables_are_right_and_fit_the_variants(path):
    table = json.loads(path.read_text())
    configs = shipped_configs(table["arch"], table["device"])
    assert len(configs) == len(table["rows"])
    for row in table["rows"]:
        problem = Problem(**row["problem"])
        config = configs[problem]
        assert config.variant in VARIANTS
        assert problem.group_size % config.block_k == 0
        assert 0 < row["rel_err"] <= 5e-4
        gluon = {"hopper": hopper, "resident": resident}.get(config.variant)
        if gluon is None or gluon.missing() is None:
            assert choose(problem) == config
    assert shipped_configs(table["arch"], "Another GPU") == {}


def test_the_rule_is_among_the_candidates():
    for n, k in [(4096, 4096), (2048, 2048), (57344, 8192), (4096, 14336), (96, 160), (1000, 2048)]:
        for m in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
            problem = replace(PROBLEM, n=n, k=k, m_bucket=m, group_size=32 if k == 160 else 128)
            found = candidates(problem)
            assert rule(problem) in found
            assert len(found) <= 30


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GPU"):
        tune([Shape(4096, 4096)])
