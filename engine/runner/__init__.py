"""Model runners: execute one step's forward pass and sampling on one rank.

    cpu_runner.py            synchronous runner: a step is done when `execute` returns
    gpu_runner.py            asynchronous runner: `launch` queues a step, `collect` waits for its results
    input_batch.py, gpu_inputs.py: a step's token ids, positions and block tables as tensors
    cuda_graphs.py           which decoding sizes are captured as CUDA graphs, and their capture
    draft_verification.py    sampling of steps with draft tokens
    draft_model.py, draft_head.py: models that propose draft tokens
    prompt_results.py        results of a launched step: tokens, log-probabilities of prompts, pooled states

docs/gpu-engine.md describes how a step flows through the GPU runner.
"""
