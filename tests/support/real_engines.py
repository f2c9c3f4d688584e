"""Real engines on tiny models: load one, run requests through it, compare with transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.request import Request
from llmbox.engine.core.speculation.draft_choice import RowPrices
from llmbox.engine.core.step import SampledToken, ScheduledRequest, StepPlan, SyncExecutor
from llmbox.engine.executor import drafting
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from llmbox.engine.model.decoder import Decoder
from llmbox.engine.runner.cpu_runner import CPUModelRunner
from llmbox.engine.sampling_params import SamplingParams
from support.families import causal_model

if TYPE_CHECKING:  # `make gpu-check` uses this module where pytest may not be installed
    import pytest


def load(directory: Path, **options: Any) -> Engine:
    settings = {"device": "cpu", "threads": 1, "memory_bytes": 256 << 20, **options}
    return load_engine(EngineConfig(model_path=str(directory), name="tiny", **settings), lambda _: None)


def runner_of(engine: Engine) -> Any:
    runner = engine.executor
    return runner.runner if isinstance(runner, SyncExecutor) else runner


def planned(request: Request, start: int, num_tokens: int) -> ScheduledRequest:
    """As the scheduler would plan it."""
    return ScheduledRequest(request, start, num_tokens, samples=start + num_tokens == request.num_tokens)


def ask(name: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
    return AddRequest(request_id=name, prompt_ids=list(prompt), params=sampling)


def run(engine: Engine, requests: Sequence[AddRequest]) -> dict[str, list[RequestOutput]]:
    """Add all, step until nothing is left; the outputs of each."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        refusal = engine.add(request)
        if refusal is not None:
            outputs[request.request_id].append(refusal)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens(engine: Engine, requests: Sequence[AddRequest]) -> dict[str, list[int]]:
    result = {}
    for name, outputs in run(engine, requests).items():
        assert outputs[-1].finish_reason in {"length", "stop"}, outputs[-1]
        result[name] = [token for output in outputs for token in output.token_ids]
    return result


def hf_model(directory: Path) -> Any:
    kind = causal_model(json.loads((directory / "config.json").read_text())["model_type"])
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def hf_tokens(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy, with transformers' own cache."""
    if model.config.model_type in {"falcon_mamba", "mamba", "mamba2"}:
        return hf_tokens_without_cache(model, prompt, max_tokens)
    ids, cache, result = torch.tensor([list(prompt)]), None, []
    for _ in range(max_tokens):
        # Bamba's module counts positions from 0 in every call unless it is told them, as `generate` does.
        end = len(prompt) + len(result)
        positions = torch.arange(end - ids.shape[1], end).unsqueeze(0)
        out = model(ids, past_key_values=cache, position_ids=positions, use_cache=True)
        cache = out.past_key_values
        ids = out.logits[:, -1:].argmax(-1)
        result.append(int(ids))
    return result


def hf_tokens_without_cache(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy, the whole text for each token: the cache of Mamba models is another."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class LogitsKeeper:
    """Stands in for the sampler: keeps every row's logits."""

    finds_best = False

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def sample(self, logits_RV: Tensor, requests: list[Request]) -> list[SampledToken]:
        self.rows += list(logits_RV.clone())
        return [SampledToken(0) for _ in requests]


def one_request(runner: CPUModelRunner, ids: list[int], prefill: int) -> Request:
    """A request of the first `prefill` tokens, with blocks for all, as the scheduler would admit it."""
    request = Request(request_id="r", prompt_ids=ids[:prefill], params=SamplingParams(max_tokens=1))
    request.block_table = list(range(-(-len(ids) // 16)))
    request.choose_factors(runner._rotary.short_context)
    return request


def all_logits(runner: CPUModelRunner, ids: list[int]) -> Tensor:
    """Logits of every position of one prefill."""
    request = one_request(runner, ids, len(ids))
    hidden: list[Tensor] = []
    model: Decoder = runner._model
    original, model.hidden = (
        model.hidden,
        lambda forward, _rows: hidden.append(original(forward, None)) or hidden[0],
    )
    runner._sampler = LogitsKeeper()
    runner.execute(StepPlan([planned(request, 0, len(ids))]))
    model.hidden = original
    return model.logits(hidden[0])


def decode_logits(runner: CPUModelRunner, ids: list[int], prefill: int) -> Tensor:
    """Logits of positions prefill - 1 on: a prefill, then one token a step."""
    keeper = runner._sampler = LogitsKeeper()
    request = one_request(runner, ids, prefill)
    start = 0
    while start < len(ids):
        runner.execute(StepPlan([planned(request, start, request.num_tokens - start)]))
        start = request.num_tokens
        request.token_ids = ids[: start + 1]
    return torch.stack(keeper.rows)


def drafts_of(engine: Engine) -> list[list[int]]:
    """Return a list that gets all drafts that its draft model or head proposes from now on."""
    proposer, proposed = engine.scheduler.drafting._models[0].proposer, list[list[int]]()
    propose = proposer.propose

    def noting(wanted: Any) -> Any:
        found = propose(wanted)
        proposed.extend(found.drafts)
        return found

    proposer.propose = noting
    return proposed


def draft_at_no_price(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Have as many drafts verified as are proposed, on a machine of any speed."""
    monkeypatch.setattr(drafting, "core_flops", lambda: 120e9)
    monkeypatch.setattr(RowPrices, "table", lambda _self, _requests, most: [1.0] * (most + 1))


PROMPT = ask("a", [3, 200, 17, 5, *range(40, 70), 9, 300], 8)


@torch.inference_mode()
def compare(model: Path, theirs: Any) -> None:
    """Compare logits of every position of `PROMPT`, and greedy tokens, with those of transformers."""
    exact = theirs(torch.tensor([PROMPT.prompt_ids])).logits[0]
    found = all_logits(runner_of(load(model)), PROMPT.prompt_ids)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 8)
