"""Bytes of weights and of everything that a step needs beside them and the KV cache. No torch."""

from llmbox.kernels.quant_formats import Quant

from ..model_config.mixed_precision import layers_bytes
from ..model_config.shape import DTYPE_BYTES, ModelShape

MIB = 1 << 20

ATTENTION_SCRATCH = 64 * MIB
"""What attention may use for one mask or score matrix: the kernel takes that many queries at a time."""
NATIVE_SCRATCH = MIB
"""What a thread of the C++ kernels keeps for its tile of attention, and more."""
PROMPT_LOGPROB_ROWS = 64
"""Rows of prompt logits made at once."""
EXPERT_ROWS = 16
"""To which the rows of an expert are filled up."""

CUDA_CONTEXT = 512 * MIB
"""What a process takes of each GPU that it opens, before the first tensor: what is planned with until it is
measured (`executor/profile.py`). PyTorch's users report 300 MB with modules loaded when first used, as CUDA
does since 11.7 (github.com/pytorch/pytorch/issues/107667), and 200 to 700 MB by card (issues/28113).
"""
_CUDA_LIBRARIES = 32 * MIB
# The workspace that torch gives cuBLAS on Hopper; 8 MiB elsewhere (torch: "cuBLAS workspaces").
_GRAPH_POOL = 192 * MIB
_GRAPH = 8 * MIB
_CPU_RUNTIME = 20 * MIB
# Measured: tests/bench/fit_error.py.


def weights_bytes(shape: ModelShape, dtype: str, quant: Quant | None) -> int:
    """Norms, biases and a table for input alone keep their dtype; the head has its own format."""
    size = DTYPE_BYTES[dtype]
    if quant is None:
        return shape.params * size
    head = shape.table_params
    head_bytes = size if shape.no_head else quant.head_bytes(size)
    kept = shape.params - shape.matmul_params
    return int(kept * size + head * head_bytes) + layers_bytes(shape, quant, size)


def workspace_bytes(
    shape: ModelShape,
    device: str,
    dtype: str,
    *,
    context: int,
    rows: int,
    max_running: int,
    native_threads: int | None = None,
    graphs: int = 0,
) -> int:
    """Everything that is neither weights nor KV, at the worst moment of a step of `rows` tokens.

    activations  rows · ((3 · hidden + max(2 · (heads + kv_heads) · head_dim, 3 · ffn)) · b + 2 · hidden · 4)
                 residual, normed input and output; the larger of attention's and the MLP's inner rows;
                 float32 inside the norm
    experts      (rows · experts a token + 16 · experts) · (2 · hidden + 3 · inner) · b: copies of rows, their
                 inner rows and results; CPU kernels take whole tiles of 16 for an expert
    attention    a mask and scores, at most ATTENTION_SCRATCH each, and one request's K and V gathered in
                 float32, padded by at most a half: 3 · context · kv_heads · head_dim · 4. The C++ kernels
                 (`native_threads` of them) read keys where they lie, and keep a tile of scores a thread
    positions    RoPE tables of cosines and sines: 2 · context · head_dim · 4
    logits       (max_running + PROMPT_LOGPROB_ROWS) · vocab · (4 + b), and the sampler's integers: 32 bytes a
                 vocabulary entry for each row it takes at once
    runtime      what CUDA takes for itself; on a CPU what the allocator keeps and the interpreter grows by
    graphs       what is kept for so many of them
    """
    size = DTYPE_BYTES[dtype]
    inner = max(2 * (shape.heads + shape.kv_heads) * shape.head_dim, 3 * shape.ffn)
    activations = rows * (3 * shape.hidden * size + inner * size + 2 * shape.hidden * 4)
    if shape.experts is not None:
        gathered_rows = rows * shape.experts.per_token + EXPERT_ROWS * shape.experts.count
        activations += gathered_rows * (2 * shape.hidden + 3 * shape.experts.inner) * size
    scores = 2 * min(ATTENTION_SCRATCH, shape.heads * rows * context * 4)
    gathered = 3 * context * shape.kv_heads * shape.head_dim * 4
    if native_threads is not None:
        scores, gathered = native_threads * NATIVE_SCRATCH, 0
    positions = 2 * context * shape.head_dim * 4
    sampled = max_running + PROMPT_LOGPROB_ROWS
    at_once = PROMPT_LOGPROB_ROWS if device == "cuda" else 1
    logits = shape.vocab * (sampled * (4 + size) + at_once * 32)
    runtime = CUDA_CONTEXT + _CUDA_LIBRARIES if device == "cuda" else _CPU_RUNTIME
    return activations + scores + gathered + positions + logits + runtime + graphs_reserve(graphs)


def graphs_reserve(sizes: int) -> int:
    """For that many graphs: the largest one's activations, and what a graph's own nodes take."""
    return _GRAPH_POOL + sizes * _GRAPH if sizes else 0


def capture_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 32 beyond; `most` last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]
