"""A model by transformers on this CPU: prompts of 512 and 2,048, one stream and eight. bfloat16.

`python -P tests/bench/transformers_speed.py MODEL [--threads 2] [--rounds 3]`; medians of the rounds, beside
which `engine_speed.py` and `llama-bench -p 512,2048 -n 128` say what engines alone do.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    for streams, prompt, output in ((1, 512, 1), (1, 2048, 1), (1, 128, 128), (8, 128, 64)):
        rates = [rate(model, streams, prompt, output) for _ in range(args.rounds)]
        print(f"{streams} x {prompt} in, {output} out: {statistics.median(rates):.1f} tok/s", flush=True)


@torch.inference_mode()
def rate(model: torch.nn.Module, streams: int, prompt: int, output: int) -> float:
    """Tokens a second: of the prompt where one comes out, else of the answers after their first token."""
    ids_NT = torch.randint(1000, 100_000, (streams, prompt))
    settings = {"do_sample": False, "min_new_tokens": 1, "pad_token_id": 0}
    begun = time.perf_counter()
    model.generate(ids_NT, attention_mask=torch.ones_like(ids_NT), max_new_tokens=1, **settings)
    first = time.perf_counter() - begun
    if output == 1:
        return streams * prompt / first
    settings["min_new_tokens"] = output
    begun = time.perf_counter()
    model.generate(ids_NT, attention_mask=torch.ones_like(ids_NT), max_new_tokens=output, **settings)
    return streams * (output - 1) / (time.perf_counter() - begun - first)


if __name__ == "__main__":
    main()
