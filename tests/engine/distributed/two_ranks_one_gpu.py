"""Two ranks of `all_reduce_add_rms_norm` on one GPU, a stream each, that wait for each other, also in graphs.

Each rank's kernel runs alone before, over what the other would have told, and so does its graph: loading a
kernel or a graph's first launch may wait for the device, and a device on which a rank waits for one that is
not launched yet never gets done.
"""

import torch

from llmbox.engine.distributed.fused_allreduce_rmsnorm_kernel import Peers, all_reduce_add_rms_norm
from llmbox.kernels.reference import REFERENCE

RANKS, ROWS, WIDTH, EPS = 2, 16, 4096, 1e-5
HALF = ROWS * WIDTH * 2
GPU = torch.device("cuda")


def main() -> None:
    buffers = [torch.zeros(2 * HALF, dtype=torch.uint8, device=GPU) for _ in range(RANKS)]
    flags = [torch.zeros(ROWS, RANKS, dtype=torch.int32, device=GPU) for _ in range(RANKS)]
    starts, told = (torch.tensor([each.data_ptr() for each in all_], device=GPU) for all_ in (buffers, flags))
    peers = [
        Peers(rank, starts, told, torch.zeros(ROWS, dtype=torch.int32, device=GPU), HALF)
        for rank in range(RANKS)
    ]
    x = [torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=GPU) for _ in range(RANKS)]
    residual = [torch.zeros_like(x[0]) for _ in range(RANKS)]
    weight = torch.rand(WIDTH, device=GPU).bfloat16()
    outs: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        outs[rank] = all_reduce_add_rms_norm(x[rank], residual[rank], weight, EPS, peers[rank])

    for rank in range(RANKS):
        flags[rank].fill_(1)
        run(rank)
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(RANKS)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=streams[rank]):
            run(rank)
        flags[rank].fill_(2)
        graph.replay()
        torch.cuda.synchronize()
    for turn in range(200):
        for each in (*x, residual[0]):
            each.copy_(torch.randn_like(each))
        residual[1].copy_(residual[0])
        wanted_residual = residual[0].clone()
        total = (x[0].float() + x[1].float()).bfloat16()
        wanted = REFERENCE.add_rms_norm(total, wanted_residual, weight, EPS)
        torch.cuda.synchronize()
        for rank in (0, 1) if turn % 2 else (1, 0):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
        torch.cuda.synchronize()
        for rank in range(RANKS):
            assert torch.equal(residual[rank], wanted_residual), turn
            torch.testing.assert_close(outs[rank], wanted, rtol=0.02, atol=0.02)


if __name__ == "__main__":
    main()
