"""Train a small Llama that was never quantized, to compare quantizers on: 8 blocks, 34 M weights.

    python benchmarks/train_small.py TEXT --tokenizer FOLDER --out FOLDER --steps 600 --device cuda

It is no good as a language model (one text of two megabytes), but its weights come from training in
bfloat16 autocast with float32 masters, not from a 4-bit file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
    ids = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.LlamaForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=args.steps, pct_start=0.1)
    for step in range(args.steps):
        starts = torch.randint(0, len(ids) - args.length, (args.batch,))
        batch = torch.stack([ids[start : start + args.length] for start in starts]).to(args.device)
        with torch.autocast(torch.device(args.device).type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step + 1 == args.steps:
            print(step, round(loss.item(), 3), flush=True)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
