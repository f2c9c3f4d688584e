"""Shapes of well-known models."""

from dataclasses import replace

from llmbox.engine.model_config.shape import ModelShape

LLAMA_3_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    tied=False,
    context_limit=8192,
)
QWEN_3_600M = ModelShape(
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=3072,
    vocab=151936,
    tied=True,
    context_limit=40960,
    qk_norm=True,
)
QWEN_2_500M = ModelShape(
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    ffn=4864,
    vocab=151936,
    tied=True,
    context_limit=32768,
    qkv_bias=True,
)
MISTRAL_7B = replace(LLAMA_3_8B, vocab=32000, context_limit=32768, sliding_window=4096)
