"""Trains the built-in model from scratch on the CPU."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import torch
from questions import Writer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096


@dataclass(frozen=True)
class Plan:
    steps: int = 5500
    rows: int = 8
    row_length: int = 256
    warmup: int = 50
    decay: float = 0.35
    peak: float = 2e-3
    weight_decay: float = 0.05
    # Now and then fewer but longer rows with as many tokens, so that long contexts are not unknown ground.
    long_every: int = 20
    long_length: int = 2048
    # Weights to begin with; None: from nothing.
    begin: Path | None = None
    # Where to save now and then, and to go on from if the file is there.
    checkpoint: Path | None = None
    checkpoint_every: int = 50


def new_model(vocab: int, eos: list[int], pad: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return Qwen3ForCausalLM(config)


def rows(writer: Writer, tokenizer: Tokenizer, length: int) -> Iterator[tuple[list[int], list[float]]]:
    """Rows of `length` tokens that begin at the start of a text; the last text of a row is cut."""
    ids: list[int] = []
    weights: list[float] = []
    for text in writer.texts():
        for piece, weight in text:
            piece_ids = tokenizer.encode(piece, add_special_tokens=False).ids
            ids += piece_ids
            weights += [weight] * len(piece_ids)
        if len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            ids, weights = [], []


def train(writer: Writer, tokenizer: Tokenizer, plan: Plan) -> tuple[Qwen3ForCausalLM, float]:
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    model = new_model(tokenizer.get_vocab_size(), eos, eos[1])
    if plan.begin is not None:
        model.load_state_dict(load_file(plan.begin), strict=False)
    optimizer = _optimizer(model, plan)
    first = 0
    if plan.checkpoint is not None and plan.checkpoint.exists():
        first = checkpoint.restore(plan.checkpoint, model, optimizer)
        print(f"goes on at step {first}", flush=True)
    short, long = (rows(writer, tokenizer, n) for n in (plan.row_length, plan.long_length))
    # Fused loops save a fifth of the time; the rare long rows are not worth a second compilation.
    fast_loss = torch.compile(_loss, dynamic=False)
    start, recent = time.monotonic(), 0.0
    for step in range(first, plan.steps):
        is_long = step % plan.long_every == plan.long_every - 1
        source, count = (
            (long, plan.rows * plan.row_length // plan.long_length) if is_long else (short, plan.rows)
        )
        ids, weights = _tensors([next(source) for _ in range(count)])
        loss = (_loss if is_long else fast_loss)(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * _schedule(step, plan)
        optimizer.step()
        optimizer.zero_grad()
        recent = loss.item() if step == first else 0.96 * recent + 0.04 * loss.item()
        if step % 25 == 0 or step == plan.steps - 1:
            seconds = time.monotonic() - start
            speed = (step + 1 - first) * plan.rows * plan.row_length / seconds
            print(f"step {step:5d}  loss {recent:.4f}  {speed:,.0f} tokens/s  {seconds:.0f} s", flush=True)
        if plan.checkpoint is not None and step % plan.checkpoint_every == plan.checkpoint_every - 1:
            checkpoint.save(plan.checkpoint, model, optimizer, step + 1)
    return model.eval(), recent


def _tensors(batch: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([row for row, _ in batch]), torch.tensor([weight for _, weight in batch])


def _loss(model: Qwen3ForCausalLM, ids_RT: Tensor, weights_RT: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits_RTV = model(input_ids=ids_RT[:, :-1]).logits
    losses = F.cross_entropy(logits_RTV.flatten(0, 1).float(), ids_RT[:, 1:].flatten(), reduction="none")
    weights = weights_RT[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def _schedule(step: int, plan: Plan) -> float:
    """Warm-up, a plateau, then straight down: unlike a cosine, a run can be prolonged on the plateau."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    left = plan.steps - step
    return min(1.0, 0.02 + left / (plan.decay * plan.steps))


def _optimizer(model: Qwen3ForCausalLM, plan: Plan) -> torch.optim.Optimizer:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [
        {"params": matrices, "peak": plan.peak, "weight_decay": plan.weight_decay},
        {"params": others, "peak": plan.peak, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak, betas=(0.9, 0.98), fused=True)
