"""A quick look at what a quantized model says, beside its source.

On a CPU the weights are decoded to fp32; on a GPU the quantized layers stay packed and run in our W4A16
kernels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit import runtime
from lowbit.calib import load_tokenizer
from lowbit.device import pick_device
from lowbit.errors import RecipeError, SourceError, one_line
from lowbit.evaluate import check_length, load_model, open_weights
from lowbit.folder import DenseView


@dataclass(frozen=True)
class Generated:
    """What the model answered, and its source, if it was asked.

    cut, source_cut: the text ended at the limit of new tokens and not by itself.
    """

    prompt: str
    text: str
    cut: bool
    source_text: str | None
    source_cut: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def generate(
    path: str | Path,
    prompt: str,
    compare: str | Path | None = None,
    *,
    max_new_tokens: int = 48,
    chat: bool = False,
    device: str = "auto",
) -> Generated:
    """Continue prompt greedily with a quantized folder (or plain model), and with `compare` if given.

    chat: put the prompt through the chat template.
    Raises RecipeError for a prompt without tokens or too long, and what opening the models raises.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RecipeError("the prompt is not UTF-8; check the terminal's encoding") from None
    target = pick_device(device)
    ours = _continue(path, prompt, max_new_tokens, chat, target)
    theirs = (None, None) if compare is None else _continue(compare, prompt, max_new_tokens, chat, target)
    return Generated(prompt, *ours, *theirs)


def _continue(
    path: str | Path, prompt: str, max_new_tokens: int, chat: bool, device: torch.device
) -> tuple[str, bool]:
    """The text, and whether it was cut at the limit."""
    with open_weights(path) as weights, torch.no_grad():
        tokenizer = load_tokenizer(weights.path)
        if chat:
            prompt = _in_template(tokenizer, prompt, weights.name)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(device)
        if not inputs.input_ids.numel():
            raise RecipeError("the prompt has no tokens; write at least a word")
        model: Any
        if device.type == "cuda" and isinstance(weights, DenseView):
            model = runtime.load(weights.path, device=device)
        else:
            model = load_model(weights, device).model
            if (generation := runtime.read_generation(weights.path)) is not None:
                model.generation_config = generation
        check_length(model, inputs.input_ids.shape[1] + max_new_tokens, "--max-new-tokens")
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        try:
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=pad,
            )
        # what generate raises for settings of another type than it expects, or that contradict each other
        except (TypeError, ValueError, AttributeError) as e:
            file = weights.path / "generation_config.json"
            if not file.is_file():
                raise
            reason = one_line(e)
            raise SourceError(f"{file}: cannot be followed ({reason}); copy the original's") from None
        ends = model.generation_config.eos_token_id
    new = output[0, inputs.input_ids.shape[1] :].tolist()
    cut = len(new) == max_new_tokens and new[-1] not in (ends if isinstance(ends, list) else [ends])
    return tokenizer.decode(new, skip_special_tokens=True), cut


def _in_template(tokenizer: Any, prompt: str, name: str) -> str:
    """The prompt as a user's message, before the answer; SourceError if the template is missing or wrong."""
    try:
        message = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # a template is a program of the model's
    except Exception as e:
        reason = one_line(e, 160)
        raise SourceError(f"{name}: no usable chat template ({reason}); leave --chat out") from None
