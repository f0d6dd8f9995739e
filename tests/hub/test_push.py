"""lowbit push over HTTP, against a loopback server that speaks the Hub's upload protocol."""

from __future__ import annotations

import hashlib
import json
import logging

import huggingface_hub
import pytest
from huggingface_hub import snapshot_download

from lowbit import events, hub
from lowbit.errors import GateError, HubError, SourceError
from lowbit.pipeline import quantize
from lowbit.recipe import make_recipe
from lowbit.verify import verify

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def accept(folder):
    """The verification of these tests: the folders below are not real checkpoints."""


def write_manifest(folder):
    listed = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lowbit.json")
    files = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in listed}
    (folder / "lowbit.json").write_text(json.dumps({"output": {"files": files}}))


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    for i, name in enumerate(SHARDS):
        (out / name).write_bytes(bytes(range(256)) * (2000 + i))
    (out / "config.json").write_text('{"model_type": "llama"}')
    (out / "README.md").write_text("---\nlicense: apache-2.0\n---\n# card\n")
    (out / "sub" / "modeling_x.py").write_text("x = 1\n")
    write_manifest(out)
    return out


def push(server, folder, repo="me/m-int4", **options):
    return hub.push(folder, repo, endpoint=server.url, check=accept, **options)


def local_files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_file_arrives_and_comes_back_byte_for_byte(server, folder, tmp_path):
    seen = []
    summary = push(server, folder, private=True, on_event=seen.append)
    assert server.repos["me/m-int4"].private
    assert set(summary["uploaded"]) == set(local_files(folder))
    assert summary["url"].startswith(f"{server.url}/me/m-int4/commit/")
    done = [e for e in seen if isinstance(e, events.LayerDone)]
    assert done[-1].done_bytes == sum(map(len, local_files(folder).values()))

    back = tmp_path / "back"
    snapshot_download("me/m-int4", local_dir=back, endpoint=server.url)
    fetched = {name: data for name, data in local_files(back).items() if not name.startswith(".cache/")}
    assert fetched == local_files(folder)


def test_quantized_model_survives_the_journey(server, llama_folder, tmp_path):
    """With the real verify on both ends; a damaged folder does not leave."""
    out = tmp_path / "out"
    quantize(llama_folder, out, make_recipe(method="rtn", device="cpu"))
    hub.push(out, "me/m", endpoint=server.url)
    back = tmp_path / "back"
    snapshot_download("me/m", local_dir=back, endpoint=server.url)
    report = verify(back)
    assert report.ok, report.failures
    assert set(server.repos["me/m"].files("main")) == {path.name for path in out.iterdir()}

    shard = out / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    before = len(server.requests)
    with pytest.raises(GateError, match="run `lowbit verify"):
        hub.push(out, "me/m", endpoint=server.url)
    assert len(server.requests) == before


def test_tuned_kernels_are_sent_as_they_are_now(server, folder):
    (folder / "lowbit_kernels.json").write_text("untuned")
    write_manifest(folder)
    (folder / "lowbit_kernels.json").write_text("tuned")
    push(server, folder)
    assert server.file("me/m-int4", "lowbit_kernels.json") == b"tuned"


def test_repo_without_owner_goes_to_the_user(server, folder):
    assert push(server, folder, repo="m")["repo"] == "me/m"


def test_second_push_of_the_same_folder_sends_and_commits_nothing(server, folder):
    push(server, folder)
    commits, before = len(server.repos["me/m-int4"].commits), len(server.uploads())
    summary = push(server, folder)
    assert summary["uploaded"] == []
    assert (len(server.repos["me/m-int4"].commits), len(server.uploads())) == (commits, before)


def test_drop_in_the_middle_and_two_503_are_survived(server, folder):
    server.fail("PUT", "/upload/", "drop")
    server.fail("PUT", "/upload/", 503, times=2)
    server.fail("POST", "/api/repos/create", 503, times=2)
    server.fail("POST", "/preupload/", "drop")
    server.fail("POST", "/commit/", 503, times=2)
    push(server, folder)
    assert all(fault.times == 0 for fault in server.faults), "a planted failure was never met"
    assert len(server.uploads()) == len(SHARDS) + 3
    for name, data in local_files(folder).items():
        assert server.file("me/m-int4", name) == data


def test_second_run_sends_only_what_is_missing(server, folder):
    second = hashlib.sha256((folder / SHARDS[1]).read_bytes()).hexdigest()
    server.fail("PUT", second, "drop", times=1000)
    with pytest.raises(HubError, match=r"cannot be reached .* run the same command again"):
        push(server, folder)
    assert server.repos["me/m-int4"].files("main") == {}, "an unfinished push must not be visible"
    server.faults, tried = [], len(server.uploads())
    push(server, folder)
    assert server.uploads()[tried:] == [f"/upload/{second}"]
    assert set(server.repos["me/m-int4"].files("main")) == set(local_files(folder))


def test_commit_whose_answer_is_lost_is_not_made_twice(server, folder):
    """The planted server commits, then fails the answer once: the repeat must find nothing left to commit."""
    real = server.RequestHandlerClass._send

    def lose_first_commit(handler, status, payload=None, headers=None):
        if "/commit/" in handler.path and not lost:
            lost.append(handler.path)
            handler.close_connection = True
            handler.connection.close()
        else:
            real(handler, status, payload, headers)

    lost = []
    server.RequestHandlerClass = type("Lossy", (server.RequestHandlerClass,), {"_send": lose_first_commit})
    push(server, folder)
    assert lost
    assert len(server.repos["me/m-int4"].commits) == 2, "the empty first commit and one push"


REFUSALS = [
    # who answers, what with, what the user reads
    ("/api/repos/create", 401, "planted", "does not accept the token"),
    ("/api/repos/create", 403, "planted", "may not write there"),
    ("/preupload/", 403, "Private repository storage limit reached", "quota or a size limit"),
    ("/preupload/", 404, "planted", "no such repository"),
    ("/commit/", 409, "planted", "changed the repository meanwhile"),
    ("/commit/", 412, "planted", r"refused \(412\)"),
    ("/commit/", 413, "planted", "quota or a size limit"),
    ("objects/batch", 507, "planted", "quota or a size limit"),
    ("/commit/", 500, "planted", "run the same command again"),
]


@pytest.mark.parametrize(
    ("path", "status", "message", "says"), REFUSALS, ids=lambda value: str(value).strip("/")
)
def test_refusal_is_one_clear_line(server, folder, path, status, message, says):
    server.fail("POST", path, status, times=1000, message=message)
    with pytest.raises(HubError, match=says) as raised:
        push(server, folder)
    assert "\n" not in str(raised.value)
    assert "me/m-int4" in str(raised.value)


def test_token_is_never_shown(server, folder, capfd, caplog):
    """Even when the server echoes it."""
    caplog.set_level(logging.DEBUG)
    server.fail("POST", "/api/repos/create", 403, times=9, message=f"token {server.token} lacks write")
    with pytest.raises(HubError) as raised:
        push(server, folder)
    server.faults = []
    push(server, folder, on_event=print)
    shown = "".join(capfd.readouterr()) + caplog.text + str(raised.value)
    assert "lacks write" in shown
    assert server.token not in shown


def test_without_token_says_how_to_get_one(server, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(HubError, match="hf auth login"):
        push(server, folder)
    assert server.requests == []


def test_wrong_token_and_foreign_owner(server, folder, monkeypatch):
    with pytest.raises(HubError, match="may not write there"):
        push(server, folder, repo="someone/else")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="does not accept the token"):
        push(server, folder)


def test_no_network_names_the_endpoint(folder, server):
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9: cannot be reached"):
        hub.push(folder, "me/m", endpoint="http://127.0.0.1:9", check=accept)


def test_bad_name_is_refused(folder, server):
    with pytest.raises(HubError, match="not a repository name"):
        push(server, folder, repo="a/b/c")


def test_dry_run_lists_and_stays_offline(server, folder):
    summary = push(server, folder, dry_run=True)
    assert set(summary["files"]) == set(local_files(folder))
    assert server.requests == []


def test_what_check_refuses_is_not_sent(server, folder):
    def refuse(path):
        raise GateError("model.layers.0.mlp.up_proj: hash differs")

    with pytest.raises(GateError, match="hash differs"):
        hub.push(folder, "me/m", endpoint=server.url, check=refuse)
    assert server.requests == []


def test_only_listed_files_are_sent_and_the_rest_is_named(server, folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "report.html").write_text("of lowbit report")
    seen = []
    push(server, folder, on_event=seen.append)
    assert not {"notes.txt", "report.html"} & set(server.repos["me/m-int4"].files("main"))
    (note,) = [event.message for event in seen if isinstance(event, events.Note)]
    assert "notes.txt" in note


def test_listed_but_absent_file_is_named(server, folder):
    (folder / SHARDS[1]).unlink()
    with pytest.raises(HubError, match=SHARDS[1]):
        push(server, folder)


def test_folder_without_manifest_is_refused(server, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="not quantized; push takes"):
        push(server, tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(HubError, match=r"lowbit\.json"):
        push(server, tmp_path)


def test_files_of_an_earlier_push_do_not_stay(server, folder):
    """A stale model.safetensors would be loaded instead of the new shards; files lowbit never sent stay."""
    push(server, folder)
    repo = server.repos["me/m-int4"]
    repo.files("main")["theirs.md"] = ("regular", b"theirs")
    (folder / SHARDS[0]).rename(folder / "model.safetensors")
    (folder / SHARDS[1]).unlink()
    write_manifest(folder)
    summary = push(server, folder)
    assert summary["deleted"] == sorted(SHARDS)
    assert set(repo.files("main")) == set(local_files(folder)) | {"theirs.md"}


@pytest.mark.parametrize(
    "left", [b"[]", b"{", b"[" * 100_000, b'{"output": 3}', b'{"output": {"files": [[]]}}']
)
def test_a_manifest_of_another_program_at_the_hub_takes_nothing_away(server, folder, left):
    push(server, folder)
    repo = server.repos["me/m-int4"]
    repo.files("main")["lowbit.json"] = ("regular", left)
    repo.files("main")["theirs.md"] = ("regular", b"theirs")
    assert push(server, folder)["deleted"] == []
    assert set(repo.files("main")) == set(local_files(folder)) | {"theirs.md"}


@pytest.mark.parametrize(
    ("repo_id", "revision"),
    [
        ("a/b/c", None),
        ("a/b c", None),
        ("../x", None),
        ("", None),
        ("me/m", ""),
        ("me/m", "a b"),
        ("me/m", "a..b"),
    ],
)
def test_names_that_the_hub_cannot_have_are_refused_without_a_network(folder, repo_id, revision):
    with pytest.raises(HubError, match="not a"):
        hub.push(folder, repo_id, revision=revision, dry_run=True)


def test_private_is_not_ignored_for_a_public_repository(server, folder):
    push(server, folder)
    with pytest.raises(HubError, match="is public"):
        push(server, folder, private=True)


def test_revision_is_a_new_branch(server, folder):
    push(server, folder, revision="g64")
    repo = server.repos["me/m-int4"]
    assert repo.files("main") == {}
    assert set(repo.files("g64")) == set(local_files(folder))


def test_pull_request_leaves_the_branch_alone(server, folder):
    push(server, folder)
    (folder / "config.json").write_text("{}")
    write_manifest(folder)
    summary = push(server, folder, create_pr=True)
    assert summary["pull_request"].endswith("/discussions/1")
    assert server.file("me/m-int4", "config.json") != b"{}"
    with pytest.raises(HubError, match="no such repository"):
        push(server, folder, repo="me/absent", create_pr=True)


def test_commit_that_lost_a_file_is_reported(server, folder):
    real = server.RequestHandlerClass._send

    def forget(handler, status, payload=None, headers=None):
        if "/tree/" in handler.path and payload:
            payload = [entry for entry in payload if entry["path"] != "config.json"]
        real(handler, status, payload, headers)

    server.RequestHandlerClass = type("Forgetful", (server.RequestHandlerClass,), {"_send": forget})
    with pytest.raises(HubError, match=r"lacks config\.json"):
        push(server, folder)
