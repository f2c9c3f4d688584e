"""Builds app/assets/builtin from nothing: data, tokenizer, training, export. `--steps N` for a quick try.

`--begin DIR` takes tokenizer and weights of an earlier artefact instead, to learn changed facts in few steps.
"""

import argparse
import itertools
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import torch
from bpe import save_tokenizer, train_tokenizer
from questions import Writer, held_out, load_facts, normalise
from safetensors.torch import save_file
from tokenizers import Tokenizer
from train import CONTEXT, Plan, train
from transformers import Qwen3ForCausalLM

OUT = Path(__file__).parents[2] / "app" / "assets" / "builtin"
TOKENIZER_TEXTS = 20_000
SEED = 7411


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--peak", type=float, default=Plan.peak, help="learning rate")
    parser.add_argument("--begin", type=Path, help="folder of an earlier artefact")
    parser.add_argument("--often", default="", help="ids of changed topics, with commas: drawn more often")
    parser.add_argument("--checkpoint", type=Path, help="file to save to, and to go on from")
    parser.add_argument("--seed", type=int, default=SEED, help="another one to go on with")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    start = time.monotonic()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    # More threads sum in another order: one keeps the artefact the same from box to box of one kind.
    torch.set_num_threads(1)

    facts, forbidden = load_facts(), {normalise(q) for q in held_out()}
    if args.begin is None:
        texts = itertools.islice(Writer(facts, SEED, forbidden).texts(), TOKENIZER_TEXTS)
        tokenizer = train_tokenizer("".join(piece for piece, _ in text) for text in texts)
        begin = None
    else:
        tokenizer = Tokenizer.from_file(str(args.begin / "tokenizer.json"))
        begin = args.begin / "model.safetensors"
    writer = Writer(facts, args.seed + 1, forbidden, frozenset(filter(None, args.often.split(","))))
    plan = replace(Plan(), steps=args.steps, peak=args.peak, begin=begin, checkpoint=args.checkpoint)
    model, loss = train(writer, tokenizer, plan)

    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out, CONTEXT)
    _save_model(model, args.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(writer.questions):,} different questions")
    print(f"loss {loss:.4f}, {time.monotonic() - start:.0f} s in all, written to {args.out}")


def _save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    # The output head is the embedding (tied): it is stored once.
    tensors = {
        k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for the owner alone, but an installed package is read by everybody.
    (folder / "model.safetensors").chmod(0o644)
    config = model.config
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id[0],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    generation = {
        "do_sample": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    for name, content in (("config.json", shape), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
