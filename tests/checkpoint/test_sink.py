"""The output folder under every interruption (CASES F): absent or complete, and always the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lowbit.checkpoint.header import read_header
from lowbit.checkpoint.ledger import Ledger, read_ledger
from lowbit.checkpoint.sink import Sink
from lowbit.checkpoint.source import open_source
from lowbit.errors import OutputError

KEY = {"recipe": {"bits": 4, "rules": []}, "source": "model"}
ODD = {
    "odd.bool": torch.tensor([True, False, True]),
    "odd.half": torch.arange(5).to(torch.float16),
    "odd.bf16": torch.arange(21).reshape(3, 7).to(torch.bfloat16),
    "odd.float": torch.arange(3).to(torch.float32),
    "odd.byte": torch.arange(9).to(torch.uint8),
}


def make_units(count: int = 12, rows: int = 40) -> dict[str, dict[str, Tensor]]:
    """Units of a few tensors: words, scales, an int64 shape; every third one also has odd sizes."""
    generator = torch.Generator().manual_seed(1)
    units: dict[str, dict[str, Tensor]] = {}
    for i in range(count):
        units[f"layer.{i}"] = {
            f"layer.{i}.packed": torch.randint(-(2**31), 2**31, (rows, 16), generator=generator).int(),
            f"layer.{i}.scale": torch.randn(rows, 2, generator=generator).half(),
            f"layer.{i}.shape": torch.tensor([rows, 128]),
        }
        if i % 3 == 0:
            units[f"layer.{i}"][f"layer.{i}.bias"] = torch.randn(rows + 1, generator=generator).bfloat16()
    units["odd"] = ODD
    units["rest"] = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "wide": torch.randn(8, 8, generator=generator).t(),
    }
    return units


def write_all(out: Path, what: dict[str, dict[str, Tensor]], **options: Any) -> dict[str, str]:
    with Sink(out, KEY, **options) as sink:
        for unit, tensors in what.items():
            if unit not in sink.done:
                sink.write(unit, tensors, {"unit": unit})
        sink.write_text("config.json", '{"a": 1}\n')
        return sink.finish({"lowbit": "test"})


def staging(out: Path) -> Path:
    return out.parent / f".{out.name}.lowbit-staging"


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_holds(out: Path, units: dict[str, dict[str, Tensor]]) -> None:
    """The folder loads through safetensors, through its index, and through our own strict reader."""
    truth = {name: tensor for tensors in units.values() for name, tensor in tensors.items()}
    shards = sorted(out.glob("*.safetensors"))
    found = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    for path in shards:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        for info in read_header(path):
            size = truth[info.name].element_size()
            assert info.offset % (8 if info.nbytes % 8 == 0 else size) == 0, info.name
    if len(shards) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {n: p.name for p in shards for n in load_file(p)}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in truth.values())
        assert [p.name for p in shards] == [
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
        ]
    assert not staging(out).exists()


LAYOUTS: dict[str, dict[str, Any]] = {
    "one shard": {},
    "one shard, announced": {"units": list(make_units())},
    "small shards": {"shard_bytes": 6000},
    "a shard for each unit": {"shard_bytes": 1},
    "tiny headers": {"units": ["x"]},
    "odd tensors in a shard of their own": {"shard_bytes": 33_200},
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_is_valid_and_hashes_are_of_the_files(case: str, tmp_path: Path) -> None:
    units = make_units()
    found = write_all(tmp_path / "out", units, **LAYOUTS[case])
    assert_holds(tmp_path / "out", units)
    assert found == hashes(tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "lowbit.json").read_text())["output"]["files"]
    assert listed == {name: digest for name, digest in found.items() if name != "lowbit.json"}
    assert write_all(tmp_path / "again", units, **LAYOUTS[case]) == found
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert (count > 1) is (case not in ("one shard", "one shard, announced")), count


def test_a_large_checkpoint_has_more_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth each, so that little is left to hash when all else is done."""
    units = make_units()
    monkeypatch.setattr("lowbit.checkpoint.sink.LEAST_SHARD", 6000)
    write_all(tmp_path / "small", units, expected_bytes=16 * 5000)
    write_all(tmp_path / "large", units, expected_bytes=16 * 60_000)
    counts = [len(list((tmp_path / name).glob("*.safetensors"))) for name in ("small", "large")]
    write_all(tmp_path / "bounded", units, shard_bytes=6000)
    assert counts[0] == len(list((tmp_path / "bounded").glob("*.safetensors"))) > counts[1]


def test_a_manifest_hash_catches_a_changed_byte(tmp_path: Path) -> None:
    found = write_all(tmp_path / "out", make_units())
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert hashes(tmp_path / "out")["model.safetensors"] != found["model.safetensors"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("layout", ["one shard", "small shards"])
@pytest.mark.parametrize("stop", [1, 5, 13])
@pytest.mark.parametrize("error", [Killed, KeyboardInterrupt, OutputError])
def test_an_interrupted_run_continues(
    layout: str, stop: int, error: type[BaseException], tmp_path: Path
) -> None:
    units, out = make_units(), tmp_path / "out"
    clean = write_all(tmp_path / "clean", units, **LAYOUTS[layout])

    def interrupted() -> None:
        with Sink(out, KEY, **LAYOUTS[layout]) as sink:
            for unit in list(units)[:stop]:
                sink.write(unit, units[unit], {"unit": unit})
            raise error("stop")

    with pytest.raises(error, match="stop"):
        interrupted()
    assert not out.exists()
    with Sink(out, KEY, **LAYOUTS[layout]) as sink:
        assert sink.done == {unit: {"unit": unit} for unit in list(units)[:stop]}
    assert write_all(out, units, **LAYOUTS[layout]) == clean
    assert_holds(out, units)


def test_nothing_is_left_if_nothing_was_written(tmp_path: Path) -> None:
    with Sink(tmp_path / "out", KEY):
        assert staging(tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def leave_unfinished(out: Path, what: dict[str, dict[str, Tensor]], count: int = 6, **options: Any) -> None:
    with Sink(out, KEY, **options) as sink:
        for unit in list(what)[:count]:
            sink.write(unit, what[unit], {"unit": unit})


def append_junk(folder: Path) -> None:
    for path in [*folder.glob("files/*.shard"), folder / "odd"]:
        path.write_bytes(path.read_bytes() + b"half a unit")


def extra_shard(folder: Path) -> None:
    (folder / "files" / ".00099.shard").write_bytes(b"x" * 5000)


def torn_line(folder: Path) -> None:
    path = folder / "ledger"
    path.write_bytes(path.read_bytes()[:-20])


def damaged_line(folder: Path) -> None:
    path = folder / "ledger"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"layer", b"lazer", 1)
    path.write_bytes(b"".join(lines))


def stray_files(folder: Path) -> None:
    (folder / "files" / "config.json").write_text("{")
    (folder / "files" / "sub").mkdir()
    (folder / "files" / "sub" / "x").write_text("x")


@pytest.mark.parametrize("layout", ["one shard", "small shards"])
@pytest.mark.parametrize("damage", [append_junk, extra_shard, torn_line, damaged_line, stray_files])
def test_what_a_kill_leaves_half_done_is_discarded(
    layout: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    units, out = make_units(), tmp_path / "out"
    clean = write_all(tmp_path / "clean", units, **LAYOUTS[layout])
    leave_unfinished(out, units, **LAYOUTS[layout])
    damage(staging(out))
    assert write_all(out, units, **LAYOUTS[layout]) == clean


def test_lost_data_is_refused_not_filled(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    leave_unfinished(out, units)
    shard = next(staging(out).glob("files/*.shard"))
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(OutputError, match="cut short since it was written; pass --no-resume"), Sink(out, KEY):
        pass
    write_all(out, units, resume=False)
    assert_holds(out, units)


@pytest.mark.parametrize("layout", ["one shard", "odd tensors in a shard of their own"])
@pytest.mark.parametrize("replaces", [False, True])
def test_finish_survives_a_stop_before_each_of_its_steps(
    layout: str, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before the n-th change to the disk for every n, as a kill would: without any cleaning up."""
    units = make_units()
    clean = write_all(tmp_path / "clean", units, **LAYOUTS[layout])
    steps = 0
    for n in range(1000):
        out = tmp_path / f"{n}" / "out"
        out.parent.mkdir()
        if replaces:
            out.mkdir()
            (out / "stale.safetensors").write_text("old")
        options = {**LAYOUTS[layout], "overwrite": replaces}
        leave_unfinished(out, units, count=len(units), **options)
        pid = os.fork()
        if pid == 0:
            _finish_and_die_before(n, out, units, options)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9), f"step {n}: {code}"
        assert not out.exists() or hashes(out) in (
            clean,
            hashes(out) if (out / "stale.safetensors").exists() else clean,
        )
        if code == 9:
            steps += 1
        if not out.exists() or (out / "stale.safetensors").exists():
            assert write_all(out, units, **options) == clean, f"step {n}"
        assert hashes(out) == clean, f"step {n}"
        if code == 0:
            break
    assert steps > 10


def _finish_and_die_before(n: int, out: Path, units: dict[str, dict[str, Tensor]], options: Any) -> None:
    """In a forked child: continue the run, and exit with 9 before the n-th system call that changes files."""
    left = [n]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return call(*args, **kwargs)

        return step

    try:
        with Sink(out, KEY, **options) as sink:
            sink.write_text("config.json", '{"a": 1}\n')
            for module, name in (
                (os, "fsync"),
                (os, "pwrite"),
                (os, "rename"),
                (os, "rmdir"),
                (os, "unlink"),
            ):
                setattr(module, name, counted(getattr(module, name)))
            Path.open = counted(Path.open)  # type: ignore[method-assign]
            Path.rename = counted(Path.rename)  # type: ignore[method-assign]
            sink.finish({"lowbit": "test"})
    except BaseException as e:
        print(e, file=sys.stderr)
        os._exit(3)
    os._exit(0)


def write_in_child(out: Path, overwrite: bool) -> int:
    """Start a process that writes 60 units slowly and finishes; return its id."""
    pid = os.fork()
    if pid:
        return pid
    # pytest-xdist's workers ignore it, and a child would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 3
    try:
        generator = torch.Generator().manual_seed(7)
        with Sink(out, KEY, shard_bytes=300_000, overwrite=overwrite) as sink:
            for i in range(60):
                words = torch.randint(0, 2**31, (100, 32), generator=generator).int()
                bias = torch.randn(33, generator=generator).half()
                if f"u{i}" not in sink.done:
                    sink.write(f"u{i}", {f"u{i}.w": words, f"u{i}.b": bias}, i)
                    time.sleep(0.005)
            sink.write_text("config.json", "{}")
            sink.finish({"a": 1})
        code = 0
    finally:
        os._exit(code)


def end_of(pid: int) -> int:
    """Wait for a child; return its exit code, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("overwrite", [False, True])
def test_kills_at_random_moments_end_in_the_same_hashes(
    with_signal: signal.Signals, overwrite: bool, tmp_path: Path
) -> None:
    moments = random.Random(with_signal * 2 + overwrite)
    began = time.monotonic()
    assert end_of(write_in_child(tmp_path / "clean", False)) == 0
    seconds = time.monotonic() - began
    clean, out, killed = hashes(tmp_path / "clean"), tmp_path / "out", 0

    def start_over() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            out.mkdir()
            (out / "stale.safetensors").write_text("old")

    def complete() -> bool:
        return out.exists() and not (out / "stale.safetensors").exists()

    start_over()
    while not complete():
        pid = write_in_child(out, overwrite)
        if killed < 10:
            time.sleep(moments.uniform(0, seconds))
            os.kill(pid, with_signal)
        killed += end_of(pid) != 0
        assert not complete() or hashes(out) == clean
        if complete() and not killed:
            # the clean run was slow for reasons of its own, and this one too quick for its signal
            seconds /= 2
            start_over()
    assert hashes(out) == clean


def with_checksum(entry: Any) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


@pytest.mark.parametrize(
    "lines",
    [b"", with_checksum([1]) * 2, with_checksum({}) * 2, with_checksum({"key": KEY, "unit": "x"}) * 2],
)
def test_a_ledger_of_another_kind_is_refused_or_begun_anew(lines: bytes, tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    clean = write_all(tmp_path / "clean", units)
    leave_unfinished(out, units)
    (staging(out) / "ledger").write_bytes(lines)
    if lines:
        with pytest.raises(OutputError, match="ledger: not as it was written; pass --no-resume"):
            write_all(out, units)
    assert write_all(out, units, resume=False) == clean


def test_a_unit_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    leave_unfinished(out, units)
    ledger = staging(out) / "ledger"
    ledger.write_bytes(ledger.read_bytes() + ledger.read_bytes().splitlines(keepends=True)[-1])
    with pytest.raises(OutputError, match="not as it was written"):
        write_all(out, units)


def test_a_folder_in_place_of_the_ledger_is_removed(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    leave_unfinished(out, units)
    (staging(out) / "ledger").unlink()
    (staging(out) / "ledger").mkdir()
    write_all(out, units)
    assert_holds(out, units)


def test_another_plan_is_named_and_refused(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    leave_unfinished(out, units)
    other = {"recipe": {"bits": 8, "rules": []}, "source": "model"}
    with (
        pytest.raises(OutputError, match=r"differs in recipe\.bits \(4, now 8\).*--no-resume"),
        Sink(out, other),
    ):
        pass
    assert staging(out).exists()
    with Sink(out, other, resume=False) as sink:
        assert sink.done == {}
    assert not staging(out).exists()


def test_two_runs_to_one_folder(tmp_path: Path) -> None:
    with Sink(tmp_path / "out", KEY) as first:
        with pytest.raises(OutputError, match="another run is writing it"), Sink(tmp_path / "out", KEY):
            pass
        assert staging(tmp_path / "out").exists()
        first.write("a", {"a": torch.zeros(4)}, None)
        first.finish()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_stale_shards_are_refused_and_with_overwrite_gone(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    out.mkdir()
    stale = out / "model-00003-of-00003.safetensors"
    stale.write_text("stale")
    with pytest.raises(OutputError, match="not empty; pass --overwrite"):
        write_all(out, units)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", stale.name]
    write_all(out, units, overwrite=True)
    assert not stale.exists()
    assert_holds(out, units)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_all(tmp_path / "out", make_units())
    assert_holds(tmp_path / "out", make_units())


def place_itself(source: Path, tmp: Path) -> Path:
    return source


def place_link(source: Path, tmp: Path) -> Path:
    (tmp / "link").symlink_to(source)
    return tmp / "link"


def place_link_to_parent(source: Path, tmp: Path) -> Path:
    (tmp / "up").symlink_to(source.parent)
    return tmp / "up" / source.name


def place_parent(source: Path, tmp: Path) -> Path:
    return source.parent


def place_of_blobs(source: Path, tmp: Path) -> Path:
    """A source of links, as in the Hub's cache, whose files are in the output folder."""
    (tmp / "blobs").mkdir()
    shutil.move(source / "model.safetensors", tmp / "blobs" / "x")
    (source / "model.safetensors").symlink_to(tmp / "blobs" / "x")
    return tmp / "blobs"


@pytest.mark.parametrize(
    "place", [place_itself, place_link, place_link_to_parent, place_parent, place_of_blobs]
)
def test_the_source_is_never_replaced(
    place: Callable[[Path, Path], Path], llama_folder: Path, tmp_path: Path
) -> None:
    out = place(llama_folder, tmp_path)
    before = hashes(llama_folder)
    with (
        pytest.raises(OutputError, match="holds the source"),
        Sink(out, KEY, source=llama_folder, overwrite=True),
    ):
        pass
    assert hashes(llama_folder) == before
    assert not list(tmp_path.glob(".*"))


def test_a_gguf_in_the_output_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    gguf = tmp_path / "out" / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with (
        pytest.raises(OutputError, match="holds the source"),
        Sink(tmp_path / "out", KEY, inputs=[gguf], overwrite=True),
    ):
        pass
    assert gguf.exists()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda tmp: tmp / "absent" / "out", "does not exist; create it first"),
        (lambda tmp: ((tmp / "out").write_text(""), tmp / "out")[1], "not a folder; choose another --out"),
        (lambda tmp: ((tmp / "out").symlink_to("out"), tmp / "out")[1], "not a folder; choose another"),
        (lambda tmp: tmp / ("x" * 250), "File name too long"),
        (lambda tmp: tmp.parent, "cannot be replaced"),
        (lambda tmp: Path("/proc/out"), "/proc"),
        (lambda tmp: Path("/"), "cannot be replaced"),
        (lambda tmp: (os.chdir(tmp), tmp)[1], "cannot be replaced"),
    ],
)
def test_places_that_cannot_be_are_refused_at_once(
    prepare: Callable[[Path], Path], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = prepare(tmp_path)
    with pytest.raises(OutputError, match=words) as error, Sink(out, KEY):
        pass
    assert "\n" not in str(error.value)


def test_overwrite_replaces_checkpoints_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, projects = tmp_path / "home", tmp_path / "projects"
    for folder, name in [(home, "config.json"), (projects, "thesis.tex")]:
        folder.mkdir()
        (folder / name).write_text("precious")
    monkeypatch.setenv("HOME", str(home))
    for out, words in [(home, "cannot be replaced"), (projects, "no checkpoint to replace, but thesis.tex")]:
        with pytest.raises(OutputError, match=words):
            write_all(out, make_units(), overwrite=True)
    assert (home / "config.json").read_text() == (projects / "thesis.tex").read_text() == "precious"


def test_text_and_names_that_are_no_utf8_are_written(tmp_path: Path) -> None:
    with Sink(tmp_path / "out", KEY) as sink:
        sink.write_text("README.md", os.fsdecode(b"caf\xc3\xa9 \xff"))
        sink.finish({"source": {"name": os.fsdecode(b"\xff")}})
    assert (tmp_path / "out" / "README.md").read_bytes() == b"caf\xc3\xa9 \\udcff"
    assert json.loads((tmp_path / "out" / "lowbit.json").read_bytes())["source"]["name"] == "\udcff"


def test_a_disk_known_to_be_too_small_is_refused_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"needs 1048576.0 GiB"),
        Sink(tmp_path / "out", KEY, expected_bytes=1 << 50),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_one_line_and_can_be_continued(small_disk: Path, tmp_path: Path) -> None:
    units = make_units(30, rows=1000)
    clean = write_all(tmp_path / "clean", units, units=list(units))
    out = small_disk / "out"
    with pytest.raises(OutputError, match="no room left") as error:
        write_all(out, units, units=list(units))
    assert "\n" not in str(error.value)
    assert not out.exists()
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    with Sink(out, KEY, units=list(units)) as sink:
        assert 0 < len(sink.done) < len(units)
    assert write_all(out, units, units=list(units)) == clean


def test_a_read_only_disk_is_one_line(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with (
        pytest.raises(OutputError, match="Read-only file system; choose an --out"),
        Sink(small_disk / "o", KEY),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied; choose an --out"), Sink(tmp_path / "out", KEY):
        pass


def test_a_file_size_limit_is_one_line_and_can_be_continued(tmp_path: Path) -> None:
    units, out = make_units(), tmp_path / "out"
    clean = write_all(tmp_path / "clean", units, units=list(units))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="no room left"):
            write_all(out, units, units=list(units))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.exists()
    assert staging(out).exists()
    assert write_all(out, units, units=list(units)) == clean


def test_side_files_are_copied_with_their_folders(llama_folder: Path, tmp_path: Path) -> None:
    (llama_folder / "1_Pooling").mkdir()
    (llama_folder / "1_Pooling" / "config.json").write_bytes(b"\xff\0binary")
    (llama_folder / "generation_config.json").write_bytes(b'{"temperature": 0.6,  "do_sample": false}')
    (llama_folder / "big.txt").write_bytes(os.urandom((4 << 20) + 5))
    with (
        open_source(str(llama_folder)) as source,
        Sink(tmp_path / "out", KEY, source=source.path) as sink,
    ):
        sink.write("a", {"a": torch.zeros(4)}, None)
        for path in source.side_files:
            sink.copy_file(path)
        found = sink.finish()
    assert found == hashes(tmp_path / "out")
    for name in ("1_Pooling/config.json", "generation_config.json", "tokenizer.json", "big.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (llama_folder / name).read_bytes()


def test_headers_are_not_wasteful(tmp_path: Path) -> None:
    units = make_units(100)
    write_all(tmp_path / "out", units, units=list(units))
    data = sum(t.nbytes for tensors in units.values() for t in tensors.values())
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < data + 700 * len(units)


def test_the_ledger_reports_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    ledger = Ledger(tmp_path / "ledger")
    ledger.append({"a": 1}, [0])
    with pytest.raises(OSError, match="Input/output error"):
        ledger.flush()
    ledger.close()
    assert read_ledger(tmp_path / "ledger") == ([], 0)


def test_ledger_entries_arrive_in_order_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for i in range(500):
        ledger.append({"unit": i, "text": "né\n"})
    ledger.flush()
    assert [entry["unit"] for entry in read_ledger(path)[0]] == list(range(500))
    ledger.close()
    whole = path.read_bytes()
    for cut in range(len(whole) - 60, len(whole)):
        path.write_bytes(whole[:cut])
        entries, size = read_ledger(path)
        assert size <= cut
        assert len(entries) == whole[:cut].count(b"\n")
