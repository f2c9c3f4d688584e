"""One model on several processes: layers shared (tensor parallel), or in stages (pipeline parallel).

    decided before    cut.py        how many parts, on which GPUs
                      layout.py     which rank holds what
                      shares.py     how much that is, and what goes between ranks
    while loading     start.py      rank 0's walk from a plan to a runner
                      crew.py       its workers; roll_call.py: what they say; link.py: the socket to each
    in a step         runner.py     rank 0 tells the step and computes its part (step_codec.py: as integers)
                      serve.py      the others do what they are told
                      rank.py       what layers ask of the other ranks, and the `Collective` that does it:
                                    mesh.py between processes on CPUs, collective.py over torch.distributed
                                    (group.py, oneshot.py, fused_sum.py, sum_norm.py)
                      draw.py       one token from logits in parts: sampler.py on CPUs, device_draw.py on GPUs
    all the time      watch.py      who is lost

docs/parallelism.md is the same from outside.
"""
