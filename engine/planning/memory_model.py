"""Memory model: bytes of weights and of the workspace, which is everything else except the KV cache."""

from dataclasses import dataclass, replace

from llmbox.kernels.quant_formats import Quant

from ..checkpoint.adapter import MAX_RANK
from ..model_config.shape import DTYPE_BYTES, ModelShape, head_bytes, layers_bytes
from ..model_config.vision.config import KEPT_IMAGE_ROWS

MIB = 1 << 20

ATTENTION_SCRATCH = 64 * MIB
"""Maximum bytes of one attention mask or score matrix: the kernel chunks queries to stay below."""
NATIVE_SCRATCH = MIB
"""Bytes of scratch memory per thread of the C++ kernels, mostly its attention tile."""
PROMPT_LOGPROB_ROWS = 64
"""Rows of prompt logits computed at once."""
MOST_DRAFT_ROWS = 64
"""Most rows of a step with draft tokens."""
ROUTER_PANEL = 64
"""Outputs of a panel of the C++ kernels."""
EXPERT_ROWS = 16
"""Tile size to which the rows of an expert are padded."""

CUDA_CONTEXT = 512 * MIB
"""Bytes of a CUDA context on each GPU, before the first tensor: the value to plan with until it is measured
(`executor/profile.py`). PyTorch's users report 300 MB with modules loaded when first used, as CUDA does since
11.7 (github.com/pytorch/pytorch/issues/107667), and 200 to 700 MB by card (issues/28113).
"""
_CUDA_LIBRARIES = 32 * MIB
# Size of the cuBLAS workspace that torch allocates on Hopper; 8 MiB elsewhere (torch: "cuBLAS workspaces").
_GRAPH_POOL = 192 * MIB
_GRAPH = 8 * MIB
_CPU_RUNTIME = 20 * MIB
# Measured: tests/bench/fit_error.py.


def weights_bytes(shape: ModelShape, dtype: str, quant: Quant | None) -> int:
    """Return the bytes of all weights. Norms, biases and an input-only embedding keep `dtype`; the output
    head has its own format.
    """
    size = DTYPE_BYTES[dtype]
    if shape.vision is not None:
        return shape.vision.params * size + weights_bytes(replace(shape, vision=None), dtype, quant)
    if quant is None:
        return shape.params * size
    head = 0 if shape.is_bidirectional else shape.table_params * head_bytes(shape, quant, size)
    table = shape.blocks.table if quant.is_gguf and shape.blocks else size
    kept = shape.params - shape.matmul_params
    routers = 0
    if shape.experts is not None and size == 2:
        routers = shape.experts.layers * router_bytes(shape.experts.count, shape.hidden)
    return int(kept * table + head) + layers_bytes(shape, quant, size) + routers


def router_bytes(experts: int, hidden: int) -> int:
    """Return the bytes that a router beside quantized weights takes on a CPU beyond two a number: it is in
    whole panels.
    """
    return 2 * hidden * (-experts % ROUTER_PANEL)


LORA_STACK = 5
"""Maximum number of adapted tensors in one stacked linear. Recurrent layers have that many."""
LORA_LOW_BYTES, LORA_EXPERT_ROW = 8 << 20, 100
"""Products of a launch on a GPU, as `kernels/triton/linear/lora.py` has them; bytes of a row of an expert
while rows are sorted: keys, places, a tile.
"""


def adapter_scratch(device: str, rows: int, per_token: int = 1) -> int:
    """Return the bytes of the products A x of a step whose rows all have an adapter of the largest rank.
    `per_token`: experts of a row, each of which has products of its own.
    """
    ranks = LORA_STACK * MAX_RANK
    if device == "cpu":
        return rows * per_token * ranks * 4
    return LORA_LOW_BYTES + (LORA_EXPERT_ROW * rows * per_token if per_token > 1 else 0)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of steps, without weights and KV cache: a function of the device and of what steps may hold."""

    device: str
    dtype: str
    context: int
    max_running: int
    native_threads: int | None = None
    """Threads of the C++ kernels; None for other kernels."""

    def peak_bytes(self, shape: ModelShape, rows: int, *, graphs: int = 0, is_alone: bool = True) -> int:
        """Return the peak bytes of a step of `rows` tokens. `graphs`: number of CUDA graphs. `is_alone`:
        False beside another model on the same GPU, whose CUDA context serves both.
        """
        runtime = _CPU_RUNTIME
        if self.device == "cuda":
            runtime = CUDA_CONTEXT + _CUDA_LIBRARIES if is_alone else 0
        positions = 2 * self.context * shape.head_dim * 4  # RoPE tables of cosines and sines
        step = self._activations(shape, rows) + self._attention(shape, rows) + positions + self._logits(shape)
        return step + runtime + graphs_reserve(graphs) + self._images(shape)

    def _activations(self, shape: ModelShape, rows: int) -> int:
        """Return the bytes of a layer's rows.

        layer      rows · ((3 · hidden + max(2 · (heads + kv_heads) · head_dim, 3 · ffn)) · b +
                   2 · hidden · 4): residual, normed input and output; the larger of attention's and the
                   MLP's inner rows; float32 inside the norm
        per layer  rows · 3 · L · P · b: embeddings of width P of all L layers, their projections and sums
        experts    (rows · experts per token + 16 · experts) · (2 · hidden + 3 · inner) · b: copies of rows,
                   their inner rows and results; CPU kernels compute whole tiles of 16 rows per expert.
                   rows · experts per token · hidden · b more for results that CPU ranks exchange
        """
        size, experts = DTYPE_BYTES[self.dtype], shape.experts
        inner = max(2 * (shape.heads + shape.kv_heads) * shape.head_dim, 3 * shape.ffn)
        total = rows * (3 * shape.hidden * size + inner * size + 2 * shape.hidden * 4)
        total += rows * 3 * shape.looked_up_width * size
        if experts is not None:
            gathered_rows = rows * experts.per_token + EXPERT_ROWS * experts.held
            total += gathered_rows * (2 * shape.hidden + 3 * experts.inner) * size
            if experts.ranks > 1 and self.device == "cpu":
                total += rows * experts.per_token * shape.hidden * size
        return total

    def _attention(self, shape: ModelShape, rows: int) -> int:
        """Return the bytes of a mask and scores, at most ATTENTION_SCRATCH each, and of one request's K and V
        gathered in float32, padded by at most a half: 3 · context · kv_heads · head_dim · 4. The C++ kernels
        read keys in place, with one tile of scores per thread.
        """
        if self.native_threads is not None:
            return self.native_threads * NATIVE_SCRATCH
        scores = 2 * min(ATTENTION_SCRATCH, shape.heads * rows * self.context * 4)
        return scores + 3 * self.context * shape.kv_heads * shape.head_dim * 4

    def _logits(self, shape: ModelShape) -> int:
        """Return (max_running + PROMPT_LOGPROB_ROWS) · vocab · (4 + b) bytes, and the sampler's integers: 32
        per vocabulary entry for each row that it processes at once.
        """
        if shape.is_bidirectional:
            return 0
        sampled = self.max_running + PROMPT_LOGPROB_ROWS
        at_once = PROMPT_LOGPROB_ROWS if self.device == "cuda" else 1
        return shape.vocab * (sampled * (4 + DTYPE_BYTES[self.dtype]) + at_once * 32)

    def _images(self, shape: ModelShape) -> int:
        """Return the bytes of a layer of the vision tower, and of the embeddings that are kept."""
        vision = shape.vision
        if vision is None:
            return 0
        numbers = vision.tower_rows * vision.patch_numbers + vision.slice_numbers
        tower = numbers * DTYPE_BYTES[self.dtype] + vision.tower_rows * vision.row_bytes
        return tower + image_cache_bytes(shape, self.dtype)


def image_cache_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of the embeddings of images that are kept."""
    return 0 if shape.vision is None else KEPT_IMAGE_ROWS * shape.vision.row * DTYPE_BYTES[dtype]


def graphs_reserve(sizes: int) -> int:
    """Return the bytes of that many CUDA graphs: the largest one's activations, and the nodes of each."""
    return _GRAPH_POOL + sizes * _GRAPH if sizes else 0


def capture_sizes(most: int) -> list[int]:
    """Return batch sizes to capture: 1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 32 beyond; `most` last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]
