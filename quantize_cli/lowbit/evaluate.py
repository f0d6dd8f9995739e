"""How much of the model is left: perplexity, and divergence from the source, on text.

The text is cut into consecutive windows of `window` tokens, each `stride` after the one before; a window that
is not full is left out. If there are more than max_tokens allow, evenly spaced ones are taken. In a window
every token is predicted from those before it, the first from nothing (it is not scored); with stride < window
only the last `stride` tokens of a window are, so that each token counts once. Perplexity is exp of the mean
negative log-likelihood over all scored tokens. KL is sum p (log p - log q), in nats, of the source's
next-token distribution p and the quantized model's q; top-1 agreement is the share of tokens where both
prefer the same.

Weights are decoded by lowbit.decode to fp32 on a CPU and to the model's dtype on a GPU. A model that does not
fit in a quarter of the memory is loaded a block at a time for each batch of windows.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import events
from lowbit.ahead import workers
from lowbit.calib import load_tokenizer
from lowbit.checkpoint.header import read_json
from lowbit.checkpoint.source import open_source
from lowbit.device import pick_device
from lowbit.errors import RecipeError, SourceError
from lowbit.folder import EVALUATION, DenseView, open_folder
from lowbit.skeleton import Skeleton, WeightSource, build_skeleton, load, stored_names, unload
from lowbit.streamed import stream_matrices
from lowbit.tasks import load_tasks, run_tasks
from lowbit.whole import whole_file

# logits of the windows that run together
LOGIT_BYTES = 512 << 20
# logits that are compared at a time, to stay in cache
SCORE_BYTES = 4 << 20


@dataclass(frozen=True)
class Scores:
    """Means over `tokens` scored tokens; what needs a source is None without one.

    kl_error: standard error of kl_mean, tokens taken as independent.
    """

    tokens: int
    perplexity: float
    source_perplexity: float | None = None
    kl_mean: float | None = None
    kl_error: float | None = None
    kl_p99: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class EvalReport:
    """Scores over everything and by domain (one for each text). protocol: what exactly was measured.

    tasks, source_tasks: lm_eval's metrics by task, empty if none was asked for.
    """

    path: str
    source: str | None
    protocol: str
    total: Scores
    domains: dict[str, Scores]
    seconds: float
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    source_tasks: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, folder: str | Path) -> Path:
        """Write the result beside the checkpoint, where `lowbit report` finds it."""
        file = Path(folder) / EVALUATION
        with whole_file(file) as half:
            half.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        return file


def evaluate(
    model: str | Path,
    source: str | Path | None = None,
    text: Sequence[str | Path] | None = None,
    *,
    max_tokens: int = 8192,
    window: int = 512,
    stride: int | None = None,
    bos: bool | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    device: str = "auto",
    on_event: events.OnEvent = events.ignore,
) -> EvalReport:
    """Score a quantized folder or a plain model, and compare it with its source if one is given.

    text: files, each a domain of its own; None takes the text shipped in the package.  max_tokens: scored in
    all, shared evenly by the domains.  stride: None is window.  bos: begin each window with the tokenizer's
    beginning-of-sequence token; None does so if the tokenizer does by itself.  tasks: of lm_eval, see
    lowbit.tasks; limit: the first examples of each.
    Raises SourceError for a text that holds less than one window, RecipeError for a window that is too long,
    tasks that cannot be loaded or a limit without tasks, and what opening the models raises.
    """
    if limit is not None and not tasks:
        raise RecipeError("--limit counts examples of --tasks; name a task, or give --max-tokens for text")
    started = time.monotonic()
    protocol = Protocol(window, stride or window, bos, max_tokens)
    texts = read_texts(text)
    target = pick_device(device)
    with ExitStack() as stack, torch.no_grad():
        weights = stack.enter_context(open_weights(model))
        origin = stack.enter_context(open_weights(source)) if source is not None else None
        tokenizer = load_tokenizer(weights.path)
        rows = make_windows(tokenizer, texts, protocol)
        loaded = load_tasks(tasks) if tasks else []
        total = sum(each.numel() for each in rows.values())
        on_event(events.Stage("eval", f"{len(texts)} texts", total, unit="tokens"))
        scored = load_model(weights, target).model
        check_length(scored, window, "--window")
        reference = load_model(origin, target).model if origin else None
        found: dict[str, list[Tensor]] = {name: [] for name in rows}
        done = 0
        for name, windows in rows.items():
            for batch in windows.split(batch_size(scored, windows.shape[1])):
                found[name].append(score(scored, reference, batch.to(target), protocol.stride))
                done += batch.numel()
                on_event(events.LayerDone(name, done))
        answers: list[dict[str, dict[str, float]]] = [{}, {}]
        if loaded:
            on_event(events.Stage("tasks", ", ".join(tasks)))
            asked = [model for model in (scored, reference) if model is not None]
            answers[: len(asked)] = [run_tasks(model, tokenizer, loaded, limit=limit) for model in asked]
    domains = {name: torch.cat(scores, 1) for name, scores in found.items()}
    report = EvalReport(
        path=str(model),
        source=str(source) if source is not None else None,
        protocol=f"{protocol}; {dtype_name(scored)} on {target.type}",
        total=summarize(torch.cat(list(domains.values()), 1)),
        domains={name: summarize(scores) for name, scores in domains.items()},
        seconds=time.monotonic() - started,
        tasks=answers[0],
        source_tasks=answers[1],
    )
    on_event(events.Done(report.to_json()))
    return report


# ---- text


@dataclass(frozen=True)
class Protocol:
    """How text becomes windows; printed with every result."""

    window: int
    stride: int
    bos: bool | None
    max_tokens: int

    def __str__(self) -> str:
        start = {None: "BOS as the tokenizer does", True: "BOS before each window", False: "no BOS"}[self.bos]
        return (
            f"windows of {self.window} tokens, stride {self.stride}, {start}, "
            f"evenly spaced, up to {self.max_tokens} tokens but at least one window of each text"
        )


def read_texts(files: Sequence[str | Path] | None) -> dict[str, str]:
    """Return text by domain: the stem of each file; None is the text in the package."""
    if files is None:
        shipped = resources.files("lowbit") / "data" / "eval"
        names = ("novels", "technical", "jargon", "commentary")
        return {name: (shipped / f"{name}.txt").read_text(encoding="utf-8") for name in names}
    texts = {}
    for file in map(Path, files):
        if file.is_char_device() or file.is_block_device():
            raise SourceError(f"{file}: a device, which has no end; pass UTF-8 text files")
        try:
            texts[file.stem if file.stem not in texts else str(file)] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise SourceError(f"{file}: {getattr(e, 'strerror', None) or e}; pass UTF-8 text files") from None
    return texts


def make_windows(tokenizer: Any, texts: dict[str, str], protocol: Protocol) -> dict[str, Tensor]:
    """Return int64 [R, window] for each text, R so that max_tokens are scored in all, but at least 1."""
    bos = protocol.bos
    if bos is None:
        bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    elif bos and tokenizer.bos_token_id is None:
        raise SourceError("--bos: this tokenizer has no beginning-of-sequence token")
    limit = max(1, protocol.max_tokens // (len(texts) * protocol.stride))
    rows = {}
    for name, content in texts.items():
        ids = torch.tensor(tokenizer(content, add_special_tokens=False, verbose=False).input_ids)
        if bos:
            first = torch.full((1,), tokenizer.bos_token_id)
            pieces = cut(ids, protocol.window - 1, protocol.stride, limit)
            rows[name] = torch.cat([first.expand(len(pieces), 1), pieces], 1)
        else:
            rows[name] = cut(ids, protocol.window, protocol.stride, limit)
        if not len(rows[name]):
            raise SourceError(
                f"{name}: {len(ids)} tokens do not fill a window of {protocol.window}; "
                "use a longer --text or a smaller --window"
            )
    return rows


def cut(ids: Tensor, window: int, stride: int, limit: int) -> Tensor:
    """Return at most `limit` full windows [R, window] of ids, evenly spaced."""
    starts = range(0, len(ids) - window + 1, stride)
    count = min(limit, len(starts))
    chosen = [starts[round(i * (len(starts) - 1) / max(1, count - 1))] for i in range(count)]
    return torch.stack([ids[at : at + window] for at in chosen]) if chosen else ids.new_empty((0, window))


# ---- models


@contextmanager
def open_weights(model: str | Path) -> Iterator[WeightSource]:
    """Open a quantized folder, decoded as it is read, or whatever open_source takes.

    Raises SourceError for a quantized folder whose files contradict each other.
    """
    path = Path(model)
    if (path / "config.json").is_file() and "quantization_config" in read_json(path / "config.json"):
        folder = open_folder(path)
        if folder.faults:
            raise SourceError(f"{path}: {folder.faults[0]}; lowbit verify lists what is wrong")
        yield DenseView(folder)
    else:
        with open_source(str(model)) as source:
            yield source


def load_model(
    weights: WeightSource, device: torch.device, *, stream: ThreadPoolExecutor | None = None
) -> Skeleton:
    """Return the transformers model with its weights, in fp32 on a CPU, in its own dtype on a GPU.

    If the parameters need more than a quarter of the machine's or the GPU's memory, decoder blocks hold none
    between calls and load them when they run.
    stream: leave matrices in their files, to be read by these threads in each call.
    Raises PlanError if transformers does not know the model, SourceError if a tensor is missing.
    """
    dtype = torch.float32 if device.type == "cpu" else stored_dtype(weights)
    skeleton = build_skeleton(weights, dtype=dtype, device=device)
    model: Any = skeleton.model
    state = model.state_dict()
    tied = model.all_tied_weights_keys
    streamed = stream_matrices(skeleton, weights, stream) if stream else set()
    names = [name for name in state if name in skeleton.origins or name not in tied]
    names = [name for name in names if name not in streamed]

    def fill(wanted: Iterable[str]) -> None:
        load(skeleton, weights, wanted, lambda name, stored: dtype, device)

    needed = sum(state[name].numel() for name in names) * dtype.itemsize
    if needed <= usable_memory(device):
        fill(names)
    else:
        in_blocks = {
            path: [name for name in stored_names(block, path) if name not in streamed]
            for path, block in skeleton.blocks.items()
        }
        inside = {name for block in in_blocks.values() for name in block}
        fill([name for name in names if name not in inside])
        for name, block in skeleton.blocks.items():
            block.register_forward_pre_hook(lambda *_, own=in_blocks[name]: fill(own))
            block.register_forward_hook(lambda *_, own=in_blocks[name]: unload(model, own))
    for name in tied.keys() - skeleton.origins.keys() - streamed:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._parameters[leaf] = model.get_parameter(tied[name])
    return skeleton


def stored_dtype(weights: WeightSource) -> torch.dtype:
    """The dtype of config.json, float16 if it says none."""
    text = weights.config.get("text_config") or weights.config
    name = weights.config.get("dtype") or weights.config.get("torch_dtype") or text.get("dtype")
    return getattr(torch, str(name), torch.float16)


def usable_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 4
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def batch_size(model: Any, window: int) -> int:
    """Windows whose logits stay under LOGIT_BYTES."""
    return max(1, LOGIT_BYTES // (4 * window * model.config.get_text_config().vocab_size))


def check_length(model: Any, tokens: int, flag: str) -> None:
    """Raise RecipeError if a model has fewer positions than tokens; flag: what sets their number."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and tokens > positions:
        raise RecipeError(
            f"{tokens} tokens are more than the model's {positions} positions; use a smaller {flag}"
        )


def dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


# ---- scores


def score(model: Any, reference: Any | None, rows: Tensor, stride: int) -> Tensor:
    """Return float64 [4, tokens] for token ids rows [B, T]: negative log-likelihood by the model and by the
    reference, KL(reference || model), and 1 where both have the same most likely token.

    Scored are the last `stride` tokens of each row, never the first. Without a reference the last three rows
    are nan.
    """
    last = min(stride, rows.shape[1] - 1)
    wanted = rows[:, -last:].reshape(-1)
    mask = torch.ones_like(rows)
    output = model(input_ids=rows, attention_mask=mask, use_cache=False)
    logits = output.logits[:, -last - 1 : -1].flatten(0, 1)
    if reference is None:
        scores = logits.new_full((4, len(wanted)), math.nan, dtype=torch.float64)
    else:
        output = reference(input_ids=rows, attention_mask=mask, use_cache=False)
        other = output.logits[:, -last - 1 : -1].flatten(0, 1)
        scores = torch.empty((4, len(wanted)), dtype=torch.float64, device=rows.device)
    step = max(1, SCORE_BYTES // (4 * logits.shape[-1]))
    for start in range(0, len(wanted), step):
        part = slice(start, start + step)
        q = logits[part].float().log_softmax(-1)
        ids = wanted[part, None]
        scores[0, part] = -q.gather(-1, ids).squeeze(-1).double()
        if reference is not None:
            p = other[part].float().log_softmax(-1)
            scores[1, part] = -p.gather(-1, ids).squeeze(-1).double()
            scores[2, part] = (p.exp() * (p - q)).sum(-1).double()
            scores[3, part] = (p.argmax(-1) == q.argmax(-1)).double()
    return scores.cpu()


def summarize(scores: Tensor) -> Scores:
    """Return the means of score()'s columns."""
    nll, source_nll, kl, same = scores
    count = len(nll)
    if bool(source_nll.isnan().all()):
        return Scores(count, math.exp(nll.mean()))
    return Scores(
        tokens=count,
        perplexity=math.exp(nll.mean()),
        source_perplexity=math.exp(source_nll.mean()),
        kl_mean=float(kl.mean()),
        kl_error=float(kl.std() / math.sqrt(count)) if count > 1 else math.nan,
        kl_p99=float(kl.quantile(0.99)),
        top1=float(same.mean()),
    )


# ---- for verify


def first_nonfinite(weights: WeightSource, device: torch.device, tokens: int = 3) -> str | None:
    """Run a few token ids through the whole model; return the first block or output that is not finite.

    Raises PlanError if transformers cannot build the model, SourceError if a tensor is missing.
    """
    bad: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not bool(torch.isfinite(hidden).all()):
                bad.append(name)

        return hook

    with torch.no_grad(), one_thread(), workers() as pool:
        skeleton = load_model(weights, device, stream=pool)
        model: Any = skeleton.model
        for name, block in skeleton.blocks.items():
            block.register_forward_hook(watch(name))
        last = model.config.get_text_config().vocab_size - 1
        ids = torch.linspace(0, last, tokens, device=device).long()[None]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    if not bad and not bool(torch.isfinite(logits).all()):
        bad.append("the output layer")
    return bad[0] if bad else None


@contextmanager
def one_thread() -> Iterator[None]:
    """For work too small to share: on a busy machine, threads that wait for each other cost twenty-fold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
