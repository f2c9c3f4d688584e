"""Exchange between the ranks of one model: collectives of tensor parallelism (TP) and pipeline parallelism
(PP), and the steps that rank 0 sends to the others.

    communicator.py           `TensorParallel`, the layers' view, and `Communicator`, the collectives below it
    shm_communicator.py       `Communicator` between CPU processes: shared memory and sockets
    torch_communicator.py     `Communicator` over torch.distributed: NCCL; gloo in tests
    custom_all_reduce.py      all-reduces between NVLink peers: one-shot, or with residual and RMSNorm in one
    fused_allreduce_rmsnorm_kernel.py    Triton kernel of the latter
    step_codec.py             steps and results between rank 0 and its workers

Elsewhere: `planning/placement.py` chooses GPUs, `model_config/parallel_layout.py` says which rank holds which
shard, `executor/` starts the workers and runs steps. docs/parallelism.md describes it for users.
"""
