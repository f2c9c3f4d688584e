"""LoRA adapters on a GPU: their kernels against exact results, compiled, and beside what they read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu.checks import LIMIT, Check, Checks, Setting, distance, name_of
from gpu.kernel_speed import BF16, Work
from llmbox.kernels.lora import ExpertLora, LoraOps, LoraPiece, LoraSite, LoraTiles, LoraWeights
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear.fused_moe import sort_experts


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


def checks_of_experts(setting: Setting, dtype: torch.dtype) -> Checks:
    """Rows of experts with several adapters and none, of one that most choose; then each row alone."""
    inputs, outputs, count, rows = (72, 96, 5, 20) if setting.tiny else (2048, 1536, 32, 300)
    lora, site, device, per_row = lora_ops(setting.device, dtype), LoraSite(), setting.device, 3
    adapters: dict[int, list[LoraWeights]] = {}
    for slot, rank in ((0, 1), (7, 16), (63, 24)):
        many = [weights(rank, inputs, outputs, dtype) for _ in range(count)]
        adapters[slot] = [replace(each, scales_R=many[0].scales_R) for each in many]
    for slot, many in adapters.items():
        lora.load_experts(site, slot, count, [of_experts(many)])
    slots = [(-1, 0, 7, 63, 5)[row % 5] for row in range(rows // 2)] + [7] * (rows - rows // 2)
    x, y = setting.randn(rows, inputs, dtype=dtype), setting.randn(rows * per_row, outputs, dtype=dtype)
    likely = setting.randn(rows, count)
    likely[:, 2] += 3
    chosen_TK = likely.topk(per_row).indices
    exact = y.double().clone()
    for row, slot in enumerate(slots):
        for k, expert in enumerate(chosen_TK[row].tolist()):
            if slot in adapters:
                one, place = adapters[slot][expert], row * per_row + k
                low = one.a_RI.to(device).double() @ x[row].double() * one.scales_R.to(device).double()
                for piece in one.pieces:
                    part = low[piece.first : piece.first + piece.b_Or.shape[1]]
                    exact[place, piece.start : piece.stop] += piece.b_Or.to(device).double() @ part

    def added_to(rows: slice) -> Tensor:
        _, order_S, tiles = sort_experts(chosen_TK[rows], count, tiles_of(slots[rows], device))
        got = y.view(-1, per_row, outputs)[rows].flatten(0, 1)[order_S]
        lora.add(site, x[rows][order_S // per_row], got, tiles)
        back = torch.empty_like(got)
        back[order_S] = got
        return back

    got = added_to(slice(None))
    yield Check(name_of("adapters of experts", dtype), distance(got, exact), LIMIT[dtype])
    other = 0
    for row in range(0, rows, 1 + rows // 12):
        if slots[row] >= 0:
            mine = got[row * per_row : (row + 1) * per_row]
            other += not torch.equal(added_to(slice(row, row + 1)), mine)
    yield Check(name_of("adapters of experts, rows alone", dtype), float(other), 0.0)


def of_experts(many: list[LoraWeights]) -> ExpertLora:
    """Stack those of each expert, which have the same ranks and scales."""
    pieces = tuple(
        LoraPiece(piece.start, piece.stop, piece.first, torch.stack([each.pieces[n].b_Or for each in many]))
        for n, piece in enumerate(many[0].pieces)
    )
    a_XRI = torch.stack([each.a_RI for each in many])
    return ExpertLora(tuple(range(len(many))), LoraWeights(a_XRI, many[0].scales_R, pieces))


def compile_all(dtype: torch.dtype = BF16) -> None:
    """Decoding and prompts have the same variants; results are of the model's dtype or float32. Experts have
    kernels that sort their rows, beside those of linears.
    """
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
    chosen_TK = torch.zeros(8, 8, dtype=torch.int64)
    sort_experts(chosen_TK, 128, tiles_of([0] * 8, device))


def all_work() -> Iterator[Callable[[], Work]]:
    for rows, adapters in ((8, 1), (8, 8), (64, 8), (4096, 1)):
        yield partial(added, rows, adapters)
    for rows, adapters in ((8, 8), (64, 8), (2048, 1)):
        yield partial(added_to_experts, rows, adapters)


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


def added_to_experts(
    rows: int, adapters: int, rank: int = 16, inputs: int = 2048, outputs: int = 1536
) -> Work:
    """Ours, with the sorting of rows, beside one product of each matrix by all rows."""
    device, count, per_row = torch.device("cuda"), 128, 8
    lora, site = lora_ops(device, BF16), LoraSite()
    one = weights(rank, inputs, outputs, BF16)
    for slot in range(adapters):
        lora.load_experts(site, slot, count, [of_experts([one] * count)])
    chosen_TK = torch.randn(rows, count, device=device).topk(per_row).indices
    x = torch.randn(rows * per_row, inputs, device=device).to(BF16)
    y = torch.zeros(rows * per_row, outputs, device=device, dtype=BF16)
    tiles = tiles_of([row * adapters // rows for row in range(rows)], device)
    a, b = one.a_RI.to(device), torch.randn(outputs, 2 * rank, device=device).to(BF16)

    def ours() -> None:
        lora.add(site, x, y, sort_experts(chosen_TK, count, tiles)[2])

    def eager() -> None:
        y.addmm_(x @ a.T, b.T)

    pairs = min(rows * per_row, adapters * count)
    numbers = pairs * (2 * rank * inputs + rank * outputs) + rows * per_row * (inputs + 2 * outputs)
    work = 2.0 * rows * per_row * rank * (2 * inputs + outputs)
    name = f"adapters of experts, {rows} rows, {adapters} of rank {rank}"
    return Work(name, 2 * numbers, work, "bf16", {"ours": [ours], "eager": [eager]})
