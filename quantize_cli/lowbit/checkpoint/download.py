"""A model of the Hugging Face Hub in the local cache: only the files that quantizing needs."""

from __future__ import annotations

import fnmatch
import glob
from pathlib import Path

from lowbit.checkpoint.header import read_json
from lowbit.errors import HubError, SourceError

SIDE_PATTERNS = ("*.json", "*.txt", "*.model", "*.py", "*.jinja", "*.md", "*.tiktoken", "LICENSE*", "NOTICE*")


def download(repo: str, revision: str | None = None, endpoint: str | None = None) -> Path:
    """Return the cached folder of a model: one kind of weights, safetensors if there is a choice, and
    no subfolders but those with code. Without a connection, what an earlier run cached.

    Raises HubError naming the repository and the remedy; the token is never part of a message.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo}@{revision}" if revision else repo
    try:
        try:
            info = HfApi(endpoint=endpoint).model_info(repo, revision=revision)
        except HfHubHTTPError:
            raise
        except (OfflineModeIsEnabled, HTTPError):
            return Path(snapshot_download(repo, revision=revision, local_files_only=True, endpoint=endpoint))
        names = [sibling.rfilename for sibling in info.siblings or []]
        weights = _single_or_index(repo, names)
        if weights.endswith(".index.json"):
            index = Path(hf_hub_download(repo, weights, revision=info.sha, endpoint=endpoint))
            shards = {str(name) for name in read_json(index).get("weight_map", {}).values()}
        else:
            shards = {weights}
        wanted = {weights, *shards, *(name for name in names if _is_side_file(name))}
        patterns = [glob.escape(name) for name in sorted(wanted)]
        # by the name of the revision, not its hash: the cache remembers it for the times without a connection
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, endpoint=endpoint))
    except GatedRepoError:
        raise HubError(
            f"{at}: access is restricted; accept its terms on the Hub, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{at}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{at}: no such folder here and no such model on the Hub, or no access to it"
        ) from None
    except LocalEntryNotFoundError as e:
        # newer clients know that the cache lacks files of the repository; those we left out on purpose
        if cached := getattr(e, "snapshot_path", None):
            return Path(cached)
        raise HubError(
            f"{at}: no such folder here, the Hub cannot be reached and the model is not in the cache"
        ) from None
    except HfHubHTTPError as e:
        status = e.response.status_code
        remedy = "renew the token with `hf auth login`" if status in (401, 403) else "try again later"
        raise HubError(f"{at}: the Hub answered {status}; {remedy}") from None
    except (HTTPError, OSError) as e:
        raise HubError(f"{at}: the download stopped ({type(e).__name__}); run again to continue it") from None


def _single_or_index(repo: str, names: list[str]) -> str:
    """Return the weight file, or the index of the shards, that open_source will use."""
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if name in names:
            return name
    ggufs = [name for name in names if name.endswith(".gguf")]
    hint = f"download {ggufs[0]} and pass that file" if ggufs else "pass a model with safetensors"
    raise SourceError(
        f"{repo}: no model.safetensors, pytorch_model.bin or index of either on the Hub; {hint}"
    )


def _is_side_file(name: str) -> bool:
    """True for configuration, tokenizer, text and code; indexes come with their weights."""
    top_level = "/" not in name
    wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in SIDE_PATTERNS)
    return name.endswith(".py") or (top_level and wanted and not name.endswith(".index.json"))
