"""What is to be reached, on one H200 with a Qwen3-8B shape in bf16."""

SGLANG = {"SGLang, Triton": 7102, "SGLang, FA3": 7555, "SGLang, FlashInfer": 8497}
"""Published tokens a second: 256 requests of 1024 in and out."""
BYTES = 4.3e12
"""A second, of a copy on the H200 of the bars: figures of other cards are scaled by it."""
BARS = {
    "256 requests of 1024 in and out": ", ".join(f"{name} {rate} tok/s" for name, rate in SGLANG.items()),
    "decode at batch 1": "at most 4.5 ms + 3.1e-5 ms a token of context; aim 90 % of the roofline",
}


def decode_bar(context: int) -> float:
    """Milliseconds of a step at batch 1: as vLLM on an H100, by the ratio of bandwidths."""
    return 4.5 + 3.1e-5 * context
