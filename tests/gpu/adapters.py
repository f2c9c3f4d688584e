"""LoRA adapters on a GPU: their kernels against exact results, compiled, and beside what they read."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu.checks import LIMIT, Check, Checks, Setting, distance, name_of
from gpu.kernel_speed import BF16, Work
from llmbox.kernels.lora import LoraOps, LoraPiece, LoraSite, LoraTiles, LoraWeights
from llmbox.kernels.triton.backend import triton_ops


def lora_ops(device: torch.device, dtype: torch.dtype) -> LoraOps:
    lora = triton_ops(device, dtype).lora
    assert lora is not None
    return lora


def weights(rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraWeights:
    """Two stacked linears."""
    half = outputs // 2
    parts = [torch.randn(half, rank).to(dtype) / rank**0.5 for _ in range(2)]
    pieces = (LoraPiece(0, half, 0, parts[0]), LoraPiece(half, 2 * half, rank, parts[1]))
    return LoraWeights(
        torch.randn(2 * rank, inputs).to(dtype) / inputs**0.5, torch.rand(2 * rank) + 0.5, pieces
    )


def tiles_of(slots: list[int], device: torch.device) -> LoraTiles:
    numbers = LoraTiles.numbers((slot, range(row, row + 1)) for row, slot in enumerate(slots))
    return LoraTiles(torch.tensor(numbers, dtype=torch.int32, device=device).view(-1, 17))


def checks(setting: Setting, dtype: torch.dtype) -> Checks:
    """Adapters of several ranks in a batch; then each row alone, bit by bit."""
    inputs, outputs, rows = (72, 96, 20) if setting.tiny else (4096, 6144, 300)
    lora, site, device = lora_ops(setting.device, dtype), LoraSite(), setting.device
    adapters = {slot: weights(rank, inputs, outputs, dtype) for slot, rank in ((0, 1), (7, 16), (63, 24))}
    for slot, adapter in adapters.items():
        lora.load(site, slot, adapter)
    slots = [(-1, 0, 7, 63, 5)[row % 5] for row in range(rows // 2)] + [7] * (rows - rows // 2)
    x, y = setting.randn(rows, inputs, dtype=dtype), setting.randn(rows, outputs, dtype=dtype)
    exact = y.double().clone()
    for row, slot in enumerate(slots):
        if (one := adapters.get(slot)) is not None:
            low = one.a_RI.to(device).double() @ x[row].double() * one.scales_R.to(device).double()
            for piece in one.pieces:
                part = low[piece.first : piece.first + piece.b_Or.shape[1]]
                exact[row, piece.start : piece.stop] += piece.b_Or.to(device).double() @ part
    got = y.clone()
    lora.add(site, x, got, tiles_of(slots, device))
    yield Check(name_of("adapters", dtype), distance(got, exact), LIMIT[dtype])
    other = 0
    for row in range(0, rows, 1 + rows // 12):
        alone = y[row : row + 1].clone()
        if slots[row] >= 0:
            lora.add(site, x[row : row + 1], alone, tiles_of([slots[row]], device))
        other += not torch.equal(alone[0], got[row])
    yield Check(name_of("adapters, rows alone", dtype), float(other), 0.0)
    table, ids = setting.randn(50, inputs, dtype=dtype), torch.arange(rows, device=device) % 50
    lora.load_table(site, 7, table)
    lora.embed(site, ids, x, 2.0, tiles_of([slot if slot == 7 else -1 for slot in slots], device))
    mine = torch.tensor([slot == 7 for slot in slots], device=device)
    yield Check(
        name_of("embeddings of adapters", dtype), distance(x[mine], table[ids[mine]] * 2), LIMIT[dtype]
    )


def compile_all(dtype: torch.dtype = BF16) -> None:
    """Decoding and prompts have the same variants; results are of the model's dtype or float32."""
    device = torch.device("cpu")
    lora, site = lora_ops(device, dtype), LoraSite()
    for inputs in (1024, 4096, 200):
        lora.load(site, 0, weights(16, inputs, 256, dtype))
        for results in {dtype, torch.float32}:
            x, y = torch.zeros(8, inputs, dtype=dtype), torch.zeros(8, 256, dtype=results)
            lora.add(site, x, y, tiles_of([0] * 8, device))
    lora.load_table(site, 0, torch.zeros(8, 256, dtype=dtype))
    lora.embed(
        site, torch.zeros(8, dtype=torch.int64), torch.zeros(8, 256, dtype=dtype), 1.0, tiles_of([0], device)
    )


def all_work() -> Iterator[Callable[[], Work]]:
    for rows, adapters in ((8, 1), (8, 8), (64, 8), (4096, 1)):
        yield partial(added, rows, adapters)


def added(rows: int, adapters: int, rank: int = 16, inputs: int = 4096, outputs: int = 6144) -> Work:
    """Ours beside one product of each matrix by all rows, as if they had one adapter."""
    device = torch.device("cuda")
    lora, site = lora_ops(device, BF16), LoraSite()
    made = [weights(rank, inputs, outputs, BF16) for _ in range(adapters)]
    for slot, each in enumerate(made):
        lora.load(site, slot, each)
    x = torch.randn(rows, inputs, device=device).to(BF16)
    y = torch.zeros(rows, outputs, device=device, dtype=BF16)
    tiles = tiles_of([row * adapters // rows for row in range(rows)], device)
    a, b = made[0].a_RI.to(device), torch.randn(outputs, 2 * rank, device=device).to(BF16)

    def eager() -> None:
        y.addmm_(x @ a.T, b.T)

    numbers = adapters * (2 * rank * inputs + rank * outputs) + rows * (inputs + 2 * outputs)
    work = 2.0 * rows * rank * (2 * inputs + outputs)
    variants = {"ours": [partial(lora.add, site, x, y, tiles)], "eager": [eager]}
    return Work(f"adapters, {rows} rows, {adapters} of rank {rank}", 2 * numbers, work, "bf16", variants)
