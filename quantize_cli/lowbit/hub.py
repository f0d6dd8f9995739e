"""Push a verified folder to the Hugging Face Hub, and the model card that goes with it.

A push is one commit. Large files are sent first, one after another, and stay at the Hub when a later step
fails, so that the same command run again sends only what is missing; nothing is visible in the repository
before the commit. After it, the listing of the commit is compared with the manifest, file by file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from lowbit import events
from lowbit.checkpoint.header import read_json
from lowbit.errors import GateError, HubError, LowbitError, SourceError, one_line
from lowbit.folder import KERNELS, LATER_FILES, MANIFEST, open_quantized
from lowbit.scheme import QuantScheme

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

# heading of a model card below which the source's text stands
BASE_CARD = "## The card of the base model"

# waits in seconds before the second and the third attempt; huggingface_hub itself repeats each PUT five times
RETRY_WAITS = (1.0, 4.0)

T = TypeVar("T")


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    on_event: events.OnEvent = events.ignore,
    check: Callable[[Path], object] | None = None,
) -> dict[str, Any]:
    """Upload exactly the files that the manifest of `folder` lists, and the manifest, to REPO_ID.

    check: raises GateError for a folder that must not be published; lowbit.verify when None.
    revision: a branch, created if absent.  create_pr: open a pull request and leave the branch alone.
    dry_run: check and list, without a network.  Files of an earlier lowbit push that this one no longer has
    are deleted in the same commit, since loaders would prefer some of them (model.safetensors to an index).
    The token comes from HF_TOKEN or `hf auth login`.
    Returns repo, files, bytes, uploaded, deleted, url and pull_request.
    Raises HubError, one line, for everything that the Hub or the network refuses.
    """
    _check_names(repo_id, revision)
    folder = open_quantized(folder, "push").path
    digests = _listed_files(folder)
    (check or _verify)(folder)
    sizes = {name: (folder / name).stat().st_size for name in digests}
    for name in sorted(_files_below(folder) - set(digests) - LATER_FILES):
        on_event(events.Note(f"{name} is not in {MANIFEST} and is not uploaded", level="warning"))
    summary: dict[str, Any] = {"repo": repo_id, "files": sorted(digests), "bytes": sum(sizes.values())}
    if dry_run:
        return summary | {"url": None, "pull_request": None, "uploaded": [], "deleted": []}

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    api, token = HfApi(endpoint=endpoint, library_name="lowbit"), get_token()
    with _one_line_errors(repo_id, api.endpoint, token):
        if token is None:
            raise HubError("no Hugging Face token; run `hf auth login` or set HF_TOKEN, with write access")
        repo_id = _retry(lambda: _open_repo(api, repo_id, private, revision, create_pr))
        present = _retry(lambda: _listing(api, repo_id, revision))
        missing = _absent(folder, digests, present)
        stale = sorted(_retry(lambda: _pushed_before(api, repo_id, revision, present)) - set(digests))

        def addition(name: str) -> CommitOperationAdd:
            operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name)
            # hashed by the quantizer and proven by verify: the client need not read the shards for it again
            operation.upload_info.sha256 = bytes.fromhex(digests[name])
            return operation

        def send(name: str) -> None:
            api.preupload_lfs_files(repo_id, [addition(name)], revision=revision, create_pr=create_pr)

        def commit() -> CommitInfo:
            # made anew for each attempt: if the answer to a commit was lost, the Hub finds nothing to change
            operations: list[Any] = [*map(addition, missing), *map(CommitOperationDelete, stale)]
            return api.create_commit(
                repo_id,
                operations,
                commit_message="Upload with lowbit",
                revision=revision,
                create_pr=create_pr,
            )

        on_event(events.Stage("push", repo_id, sum(sizes[name] for name in missing)))
        sent = 0
        for name in missing:
            _retry(partial(send, name))
            sent += sizes[name]
            on_event(events.LayerDone(name, sent))
        summary |= {"repo": repo_id, "uploaded": missing, "deleted": stale}
        if not missing and not stale:
            on_event(events.Note(f"{repo_id} already holds every file; nothing to commit"))
            return summary | {"url": f"{api.endpoint}/{repo_id}", "pull_request": None}
        # repeated, a pull request would be opened twice
        info = commit() if create_pr else _retry(commit)
        landed = _retry(lambda: _listing(api, repo_id, info.oid))
        if lost := _absent(folder, digests, landed):
            raise HubError(f"{repo_id}: the commit lacks {', '.join(lost)}; run the same command again")
        return summary | {"url": info.commit_url, "pull_request": info.pr_url}


def _absent(folder: Path, digests: dict[str, str], listing: dict[str, tuple[str | None, str]]) -> list[str]:
    """The files that a listing of the repository lacks or holds with other content."""

    def same(name: str) -> bool:
        if name not in listing:
            return False
        sha256, blob = listing[name]
        if sha256 is not None:
            return sha256 == digests[name]
        data = (folder / name).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == blob

    return [name for name in digests if not same(name)]


def _check_names(repo_id: str, revision: str | None) -> None:
    """Raise HubError for names that the Hub cannot have, before anything is read."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as e:
        said = one_line(e)
        raise HubError(f"{repo_id}: not a repository name; use NAME or OWNER/NAME ({said})") from None
    # what git takes for a branch, but for its rarer rules
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or ".." in revision):
        raise HubError(f"--revision {revision}: not a name that a branch can have")


def _verify(folder: Path) -> None:
    """Raise GateError with the first fault that verify finds."""
    from lowbit.verify import verify

    report = verify(folder)
    if not report.ok:
        more = f" and {len(report.failures) - 1} more" if len(report.failures) > 1 else ""
        raise GateError(f"{folder}: {report.failures[0]}{more}; run `lowbit verify {folder}`")


def _listed_files(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of the manifest's files, itself and the kernel configs; HubError if one is absent."""
    try:
        text = (folder / MANIFEST).read_bytes()
        files = dict(json.loads(text)["output"]["files"])
    except OSError as e:
        raise HubError(f"{folder / MANIFEST}: {e.strerror}; push takes what lowbit quantize wrote") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise HubError(f"{folder / MANIFEST}: not a lowbit manifest; quantize again") from None
    for name in files:
        if not (folder / name).is_file():
            raise HubError(f"{folder / name}: listed in {MANIFEST} but absent; quantize again")
    own = [name for name in (MANIFEST, KERNELS) if (folder / name).is_file()]
    return files | {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in own}


def _files_below(folder: Path) -> set[str]:
    """Paths in the folder, less the hidden ones, which git and the Hub client leave in a download."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "/." not in f"/{name}"}


def _open_repo(api: HfApi, repo_id: str, private: bool, revision: str | None, create_pr: bool) -> str:
    """Make sure that the repository and the branch exist; return the full name, with its owner."""
    if create_pr:
        return api.repo_info(repo_id).id
    repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
    if private and api.repo_info(repo_id).private is False:
        raise HubError(f"{repo_id} exists and is public; change that in its settings or drop --private")
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def _listing(api: HfApi, repo_id: str, revision: str | None) -> dict[str, tuple[str | None, str]]:
    """Path -> (SHA-256 or None, git blob) of every file at a revision."""
    from huggingface_hub.hf_api import RepoFile

    return {
        entry.path: (entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision)
        if isinstance(entry, RepoFile)
    }


def _pushed_before(api: HfApi, repo_id: str, revision: str | None, present: dict[str, Any]) -> set[str]:
    """Files at the Hub that an earlier lowbit push put there, by the manifest that it left."""
    if MANIFEST not in present:
        return set()
    with tempfile.TemporaryDirectory() as scratch:
        path = api.hf_hub_download(repo_id, MANIFEST, revision=revision, local_dir=scratch)
        try:
            listed = set(read_json(Path(path))["output"]["files"])
        except (SourceError, KeyError, TypeError):
            # what another program left there is not ours to take away
            return set()
    return listed & set(present)


def _retry(step: Callable[[], T]) -> T:
    """Run step, again after a dropped connection, a rate limit or a 5xx answer."""
    for wait in RETRY_WAITS:
        try:
            return step()
        except Exception as e:
            if not _is_transient(_cause(e)):
                raise
            time.sleep(wait)
    return step()


def _cause(e: BaseException) -> BaseException:
    """The HTTP error below e: uploads wrap theirs in a RuntimeError."""
    from huggingface_hub.errors import HTTPError

    inner: BaseException | None = e
    while inner is not None and not isinstance(inner, HTTPError):
        inner = inner.__cause__
    return inner or e


def _is_network(e: BaseException) -> bool:
    from huggingface_hub.errors import HTTPError

    return isinstance(e, HTTPError | ConnectionError | TimeoutError)


def _is_transient(e: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(e, HfHubHTTPError):
        return e.response.status_code == 429 or e.response.status_code >= 500
    return _is_network(e) and not isinstance(e, OfflineModeIsEnabled)


@contextmanager
def _one_line_errors(repo_id: str, endpoint: str, token: str | None) -> Iterator[None]:
    """Make one-line HubErrors, without the token, of what huggingface_hub raises; its bars are off inside."""
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    bars_were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except LowbitError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as e:
        reason = _reason(_cause(e), repo_id, endpoint)
        raise HubError(reason.replace(token, "***") if token else reason) from None
    finally:
        if bars_were_on:
            enable_progress_bars()


def _reason(e: BaseException, repo_id: str, endpoint: str) -> str:
    """What went wrong, where, and what to do."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    said = one_line(getattr(e, "server_message", None) or e, 300)
    if isinstance(e, RevisionNotFoundError):
        return f"{repo_id}: no such revision (404); --revision takes a branch name"
    if isinstance(e, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to push"
    if isinstance(e, HfHubHTTPError):
        status = e.response.status_code
        if status in (402, 413, 507) or re.search(r"quota|storage (limit|quota)|limit reached", said, re.I):
            return f"{repo_id}: the storage quota or a size limit is exceeded ({status}): {said}"
        advice = {
            401: "the Hub does not accept the token; run `hf auth login` or set HF_TOKEN",
            403: "the token may not write there; use one with write access to that namespace",
            404: "no such repository, or the token cannot see it; check the name",
            409: "something else changed the repository meanwhile; run the same command again",
            429: "too many requests; wait and run the same command again",
        }.get(status)
        if advice is None and status >= 500:
            advice = "the Hub is failing; run the same command again, uploaded files are kept"
        return f"{repo_id}: {advice or 'refused'} ({status}): {said}"
    if _is_network(e):
        return (
            f"{endpoint}: cannot be reached ({type(e).__name__}: {said}); check the network and run the same "
            "command again, uploaded files are kept"
        )
    return f"{repo_id}: {type(e).__name__}: {said}"


def model_card(manifest: dict[str, Any], source_readme: str | None = None) -> str:
    """README.md of a quantized checkpoint: the source's metadata and text, with ours added.

    The source's metadata block stays as it is written; base_model, base_model_relation, library_name and tags
    are added to it, so that a licence (or its absence) is the base model's. Sections in front of its text
    say what was done, with which error, and how to load the result.
    """
    metadata, text = _split_card(source_readme or "")
    source = manifest["source"]["name"]
    # a local folder wins over a Hub id of the same name, as it did when the source was opened
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not Path(source).exists()
    recipe = manifest["recipe"]
    ours: dict[str, Any] = {"base_model": source} if on_hub else {}
    ours |= {"base_model_relation": "quantized", "library_name": "transformers"}
    metadata = _add_metadata(metadata, ours, tags=("lowbit", f"{recipe['bits']}-bit", recipe["format"]))
    title = source if on_hub else Path(source).name
    parts = [
        f"---\n{metadata}---\n",
        f"# {title}, {recipe['bits']} bits by lowbit\n",
        *_card_sections(manifest, title),
    ]
    if text.strip():
        parts += [f"{BASE_CARD}\n", text.strip() + "\n"]
    return "\n".join(parts)


def restate_card(manifest: dict[str, Any], card: str, was: str) -> str:
    """model_card again, from a card that model_card wrote for the format `was`."""
    metadata, text = _split_card(card)
    tag = re.compile(rf"^(tags:.*?)\b{re.escape(was)}\b", re.S | re.M)
    metadata = tag.sub(lambda match: match[1] + manifest["recipe"]["format"], metadata, count=1)
    return model_card(manifest, f"---\n{metadata}---\n{text.partition(BASE_CARD)[2]}")


def _split_card(readme: str) -> tuple[str, str]:
    """The metadata block without its fences, and the text; a block that is not YAML counts as text."""
    block = re.match(r"\ufeff?\s*---[ \t]*\r?\n(.*?\n)?---[ \t]*(\r?\n|$)", readme, re.S)
    if block is None:
        return "", readme
    metadata = (block[1] or "").replace("\r\n", "\n")
    try:
        keys = yaml.safe_load(metadata) or {}
    except yaml.YAMLError:
        return "", readme
    return (metadata, readme[block.end() :]) if isinstance(keys, dict) else ("", readme)


def _add_metadata(block: str, keys: dict[str, Any], tags: tuple[str, ...]) -> str:
    """The YAML block with keys that it lacks appended and tags put in front of its own; nothing is rewritten,
    because a round trip through a YAML library turns `language: no` into false. base_model is replaced:
    what the source was made from is not what this was made from."""
    root = yaml.compose(block)
    nodes = {key.value: (key, value) for key, value in root.value} if root is not None else {}
    edits: list[tuple[int, int, str]] = []
    added = ""
    if "tags" not in nodes:
        added += yaml.safe_dump({"tags": list(tags)})
    elif isinstance(nodes["tags"][1], yaml.SequenceNode):
        own = nodes["tags"][1]
        new = [tag for tag in tags if tag not in {item.value for item in own.value}]
        at, column = own.start_mark.index, own.start_mark.column
        if own.flow_style:
            edits.append((at + 1, at + 1, "".join(f"{tag}, " for tag in new)))
        else:
            edits.append((at, at, "".join(f"- {tag}\n{' ' * column}" for tag in new)))
    for key, value in keys.items():
        line = yaml.safe_dump({key: value})
        if key not in nodes:
            added += line
        elif key == "base_model":
            start, end = nodes[key][0].start_mark.index, nodes[key][1].end_mark.index
            edits.append((start, end, line if block[:end].endswith("\n") else line.rstrip("\n")))
    for start, end, text in sorted(edits, reverse=True):
        block = block[:start] + text + block[end:]
    return block + added


def _card_sections(manifest: dict[str, Any], title: str) -> list[str]:
    """The paragraphs and tables of the card, each a string that ends in a newline."""
    recipe, layers, copied = manifest["recipe"], manifest["layers"], manifest["copied"]
    schemes = Counter(f"{row['method']} {QuantScheme(**row['scheme'])}" for row in layers)
    elements = sum(math.prod(row["shape"]) for row in layers)
    packed = sum(row["packed_bytes"] for row in layers)
    facts = {
        "Base model": title,
        "Format": recipe["format"],
        "Quantized": ", ".join(f"{count} layers {scheme}" for scheme, count in schemes.items()),
        "Bits per quantized weight": f"{8 * packed / elements:.2f}, scales and zero-points included",
        "Kept as they were": f"{len(copied)} tensors",
        "Fell back": f"{sum(row['fallback'] is not None for row in layers)} layers, reasons in `{MANIFEST}`",
        "Made with": f"lowbit {manifest['lowbit']}, seed {manifest['seed']}",
    }
    keys = {
        key: value for key, value in json.loads(json.dumps(recipe)).items() if value not in (None, [], {})
    }
    return [
        _table(("", ""), facts.items()),
        "## Recipe\n",
        f"```yaml\n{yaml.safe_dump(keys, sort_keys=False)}```\n",
        "## Quality\n",
        *_quality(manifest),
        "## Use\n",
        "MODEL is this repository's name, or a local copy of it.\n",
        *_how_to_load(manifest),
    ]


def _quality(manifest: dict[str, Any]) -> list[str]:
    """What was measured against the base model's weights and, if `lowbit eval` was run, its predictions."""
    rows = [(name, f"{value:.4g}") for name, value in manifest.get("eval", {}).items()]
    for name, label in (("weight_error", "relative weight error"), ("output_error", "relative output error")):
        by_layer = {row["name"]: row["errors"][name] for row in manifest["layers"] if row["errors"]}
        if by_layer:
            worst = max(by_layer, key=lambda layer: by_layer[layer])
            rows.append((f"{label}, median layer", f"{statistics.median(by_layer.values()):.4g}"))
            rows.append((f"{label}, worst layer ({worst})", f"{by_layer[worst]:.4g}"))
    return [_table(("measure", "value"), rows)]


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines) + "\n"


def _how_to_load(manifest: dict[str, Any]) -> list[str]:
    """One snippet per engine, or why it cannot load the checkpoint; docs/loaders.md has the runs."""
    format, layers = manifest["recipe"]["format"], manifest["layers"]
    mixed = len({(row["scheme"]["bits"], row["scheme"]["group_size"]) for row in layers}) > 1
    partial = any(row["linear"] and row["name"] != "lm_head.weight" for row in manifest["copied"])
    asymmetric = any(not row["scheme"]["symmetric"] for row in layers)
    moe = any(".experts." in row["name"] for row in layers)
    odd_bits = {f"int{row['scheme']['bits']}" for row in layers} - {"int4", "int8"}
    needs = "compressed-tensors" if format == "compressed-tensors" else "gptqmodel optimum"
    names, config = "AutoModelForCausalLM", ""
    if format == "compressed-tensors" and asymmetric:
        names, config = (
            f"{names}, CompressedTensorsConfig",
            ", quantization_config=CompressedTensorsConfig(dequantize=True)",
        )
    transformers = (
        f"```python\n# pip install transformers {needs}\nfrom transformers import {names}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("MODEL"{config})\n```\n'
    )
    vllm, sglang = (
        "```sh\nvllm serve MODEL\n```\n",
        "```sh\npython -m sglang.launch_server --model-path MODEL\n```\n",
    )
    if format.startswith("gptq") and (mixed or partial):
        # transformers does not read the per-layer rules of a GPTQ config
        transformers = (
            "```python\n# pip install gptqmodel\nfrom gptqmodel import GPTQModel\n\n"
            'model = GPTQModel.load("MODEL")\n```\n'
        )
    if format == "compressed-tensors" and asymmetric and mixed:
        transformers = "Transformers loads zero-points of one scheme only; use one of the engines below.\n"
    if moe and (asymmetric or format != "compressed-tensors"):
        transformers = "Transformers does not load these experts; use one of the engines below.\n"
    if moe and asymmetric and format == "compressed-tensors":
        sglang = "SGLang takes only symmetric experts.\n"
    if asymmetric and format.startswith("gptq"):
        vllm = sglang = "Its kernels take only symmetric GPTQ checkpoints.\n"
    if odd_bits:
        vllm = sglang = f"It has no kernel for {', '.join(sorted(odd_bits))}.\n"
    lowbit = '```python\nimport lowbit\n\nmodel = lowbit.load("MODEL")\n```\n'
    engines = {"transformers": transformers, "vLLM": vllm, "SGLang": sglang, "lowbit": lowbit}
    return [text for engine, how in engines.items() for text in (f"### {engine}\n", how)]
