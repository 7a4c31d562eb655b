"""Training of the demo model, a tiny Llama that adds in words; writes a Hugging Face folder.

Has the model's shape, its word-level tokenizer and the recipe; checks the model on unseen sums.
"""

# ruff: noqa: T201 - a command of its own, so it prints

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from dakrun.demo import task

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
IGNORED = -100
REQUIRED_ACCURACY = 0.95

STEPS = 1200
BATCH = 256
WARMUP = 100
PEAK_RATE = 1.5e-3
WEIGHT_DECAY = 0.5
CLIP = 1.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word and the begin token before every text."""
    ids = {token: number for number, token in enumerate((*SPECIAL, *task.VOCABULARY))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, ids[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model; its vocabulary is padded to 64 rows."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def build_data(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of all training sums, padded on the right, and the labels: only the answers."""
    rows, starts = [], []
    for a, b in task.training_pairs():
        question = tokenizer.encode(task.prompt(a, b))
        reply = tokenizer.encode(task.answer(a, b), add_special_tokens=False)
        rows.append(torch.tensor([*question, *reply, tokenizer.eos_token_id]))
        starts.append(len(question))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad(rows, batch_first=True, padding_value=IGNORED)
    labels[torch.arange(labels.shape[1]) < torch.tensor(starts)[:, None]] = IGNORED
    return ids, labels


def learning_rate(step: int, steps: int) -> float:
    """The fraction of the peak rate at `step`: a linear warm-up, then a cosine down to zero."""
    warmup = min(WARMUP, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    """Train in place on shuffled minibatches, printing the loss every 100 steps."""
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate(n, steps))
    model.train()
    began = time.monotonic()
    order = torch.randperm(len(ids))
    for step in range(1, steps + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(ids))
        batch, order = order[:BATCH], order[BATCH:]
        loss = model(input_ids=ids[batch], labels=labels[batch], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - began
            print(f"step {step}/{steps}  loss {loss.item():.5f}  {seconds:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in float16, its configuration and its tokenizer into the folder `out`."""
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 records a class name that transformers 4 lacks; both know this one.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def accuracy(folder: Path) -> float:
    """Load the model in its saved dtype; the fraction of held-out sums that it answers right."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    pairs = task.held_out()
    inputs = tokenizer([task.prompt(a, b) for a, b in pairs], padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=8,
    )
    replies = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = sum(task.is_right(a, b, text) for (a, b), text in zip(pairs, replies, strict=True))
    return right / len(pairs)


def main(argv: list[str] | None = None) -> int:
    """Train, write and check the model; returns 0 if its accuracy suffices, else 1."""
    parser = argparse.ArgumentParser(prog="python -m dakrun.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="minibatches to train on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order")
    args = parser.parse_args(argv)

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    ids, labels = build_data(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(ids):,} sums to train on", flush=True)
    train(model, ids, labels, args.steps)
    save(model, tokenizer, args.out)
    reached = accuracy(args.out)
    print(f"held-out accuracy {reached:.1%} (greedy, {len(task.held_out())} sums), in {args.out}")
    return 0 if reached >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
