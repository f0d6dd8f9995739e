"""A model named by its Hub id: only what is needed is fetched, and every refusal is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from lowbit.checkpoint.download import download
from lowbit.checkpoint.source import open_source
from lowbit.errors import HubError, LowbitError

EXTRA = {
    "pytorch_model.bin": b"other weights",
    "original/consolidated.00.pth": b"more weights",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"onnx",
    "model.gguf": b"gguf",
    "picture.png": b"png",
    "code/modeling_x.py": b"x = 1\n",
    "README.md": b"# read me\n",
    "LICENSE": b"licence",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def publish(server, build_llama: Callable[..., Path]) -> Callable[..., Path]:
    """Put a Llama with extra files on the server as me/llama; return the folder it came from."""

    def put(**options: object) -> Path:
        folder = build_llama(**options)
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | EXTRA
        repo = server.new_repo("me/llama")
        kinds = {
            name: "lfs" if name.endswith((".safetensors", ".bin", ".pth")) else "regular" for name in files
        }
        repo.commits["1" * 40] = {name: (kinds[name], data) for name, data in files.items()}
        repo.branches["main"] = "1" * 40
        return folder

    return put


@pytest.mark.parametrize("options", [{}, {"shard_size": "1MB"}], ids=str)
def test_only_what_is_needed_is_fetched(options, publish, server) -> None:
    folder = publish(**options)
    found = download("me/llama", endpoint=server.url)
    names = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert names == {path.name for path in folder.iterdir()} | {"code/modeling_x.py", "README.md", "LICENSE"}
    fetched = {path.rpartition("/")[2] for method, path in server.requests if "/resolve/" in path}
    assert not fetched & {
        "pytorch_model.bin",
        "consolidated.00.pth",
        "model.onnx",
        "picture.png",
        "model.gguf",
    }
    with open_source(str(found)) as source, open_source(str(folder)) as truth:
        assert all(source.read(name).equal(truth.read(name)) for name in truth.tensors)


def test_without_a_connection_the_cache_serves(publish, server) -> None:
    publish()
    found = download("me/llama", endpoint=server.url)
    assert download("me/llama", endpoint="http://127.0.0.1:9") == found


@pytest.mark.parametrize(
    ("repo", "revision", "words"),
    [
        ("me/absent", None, "me/absent: no such folder here and no such model on the Hub"),
        ("me/llama", "v9", "me/llama@v9: the repository has no such revision"),
    ],
)
def test_what_is_not_there_is_named(repo, revision, words, publish, server) -> None:
    publish()
    with pytest.raises(HubError, match=words):
        download(repo, revision, endpoint=server.url)


def test_nothing_reachable_and_nothing_cached(server) -> None:
    with pytest.raises(HubError, match="no such folder here, the Hub cannot be reached and the model is not"):
        download("me/llama", endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("status", "words"), [(401, "answered 401; renew the token"), (500, "the Hub answered 500")]
)
def test_refusals_are_one_line_without_the_token(status, words, publish, server, caplog) -> None:
    publish()
    server.fail("GET", "/api/models/", status, times=99)
    with pytest.raises(HubError, match=words) as error:
        download("me/llama", endpoint=server.url)
    assert "\n" not in str(error.value)
    assert server.token not in str(error.value) + caplog.text


def test_weights_of_no_known_kind_are_refused(publish, server) -> None:
    publish()
    files = server.repos["me/llama"].commits["1" * 40]
    for name in ("model.safetensors", "pytorch_model.bin"):
        del files[name]
    with pytest.raises(LowbitError, match=r"download model\.gguf and pass that file"):
        download("me/llama", endpoint=server.url)
