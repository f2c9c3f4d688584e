"""From how many tokens on PyTorch's attention serves prompts better: what LLMBOX_SDPA_FROM should be."""

from collections.abc import Mapping

import torch

from gpu.kernel_speed import prefill
from gpu.report import Report
from gpu.timing import times

TOKENS = (512, 1024, 2048, 4096, 8192)
PASTS = (0, 8192)
"""Tokens before the chunk: keys and values of all of them are gathered too."""
MARGIN = 0.95
"""Of our time that the other may take at most: less is not worth its memory."""

Pairs = Mapping[int, list[tuple[float, float]]]
"""By tokens: (our kernel's milliseconds, those of SDPA on gathered pages), for each past."""


def report_rule(report: Report) -> None:
    found: dict[int, list[tuple[float, float]]] = {}
    for tokens in TOKENS:
        if report.left < 0:
            report.say("\nLong prompts through SDPA: out of time.")
            return
        try:
            found[tokens] = [pair(tokens, past) for past in PASTS]
        except torch.cuda.OutOfMemoryError:
            break
        torch.cuda.empty_cache()
    report.say("")
    for tokens, pairs in found.items():
        shown = ", ".join(
            f"{ours:.3f} / {other:.3f} after {past}" for past, (ours, other) in zip(PASTS, pairs, strict=True)
        )
        report.say(f"- attention of {tokens} tokens, ours / SDPA on gathered pages, ms: {shown}")
    report.say(f"\n{rule(found)}")


def pair(tokens: int, past: int) -> tuple[float, float]:
    variants = prefill(tokens, past).variants
    spent = times({name: variants[name] for name in ("ours", "SDPA, gathered")})
    return spent["ours"], spent["SDPA, gathered"]


def rule(found: Pairs) -> str:
    """The least number of tokens from which on SDPA wins at every size and past."""
    least = None
    for tokens in sorted(found, reverse=True):
        if any(other > MARGIN * ours for ours, other in found[tokens]):
            break
        least = tokens
    if least is None:
        return "Long prompts: our kernel is as fast at the largest size; leave LLMBOX_SDPA_FROM unset."
    return f"Long prompts: SDPA on gathered pages is faster from {least} tokens on; LLMBOX_SDPA_FROM={least}."
