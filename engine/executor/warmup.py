"""Trial steps of a load: they compile all kernels, and the largest tell the memory that a step takes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from ..core.request import Request
from ..core.step import ScheduledRequest, StepPlan
from ..ipc.messages import PreparedImage
from ..model_config.vision.config import VisionConfig
from ..model_config.vision.layout import lay_out_image
from ..planning.memory_plan import MemoryPlan
from ..runner.draft_head import DeviceHeadRunner
from ..runner.gpu_runner import GPUModelRunner
from ..runner.image_rows import EncodedImages
from ..sampling_params import SamplingParams

SHORT = 20
"""Tokens of a context that no attention kernel splits into chunks, as it does with long ones."""
MEDIUM: Final = 300
"""Tokens of a context that is split into a few chunks."""
DRAWS: Final[tuple[dict[str, Any], ...]] = ({}, {"top_k": 20}, {"top_p": 0.9})
"""Sampling parameters that take different code paths where ranks share the logits."""
RULED: Final[dict[str, Any]] = {"top_p": 0.9, "repetition_penalty": 1.1}
"""Penalties use other sampling kernels."""
TOLD: Final[dict[str, Any]] = {"prompt_logprobs": 20}
"""Parameters of a prompt with as many alternatives as a request may ask for over HTTP."""


def warmup_steps(plan: MemoryPlan, row_counts: Sequence[int]) -> Iterator[StepPlan]:
    """Yield the warm-up steps; the largest come last, when all kernels are compiled.

    `row_counts`: `Ops.warmup_batch_sizes`.
    """
    for count in counts_up_to(_most_sequences(plan), row_counts):
        yield decoding(plan, count)
    if row_counts:
        yield from (decoding(plan, 1, **draws) for draws in DRAWS)
    for count in counts_up_to(plan.step_tokens, [count for count in row_counts if count > 1]):
        yield StepPlan(prompts(plan, count))
    if row_counts and plan.max_running > 1:
        # Contexts of a step with prompts in it are as long as the longest one there.
        for context in (SHORT, MEDIUM, plan.context):
            decoding_one = sequence(plan, min(context, plan.context - 1), 1, "decodes")
            yield StepPlan([decoding_one, *prompts(plan, 2)], [(0, 1)])
    yield long_prompt(plan)
    yield largest_step(plan)


def num_warmup_blocks(plan: MemoryPlan) -> int:
    """Return how many KV blocks the sequences share: at least two, as one is copied to another."""
    return max(2, -(-_sequence_length(plan) // plan.block_size))


def counts_up_to(most: int, row_counts: Sequence[int]) -> list[int]:
    return [*(count for count in row_counts if count < most), most] if row_counts else []


def largest_step(plan: MemoryPlan) -> StepPlan:
    """Build the largest step: the most tokens in the most sequences, sampled with top-p and penalties."""
    length = _sequence_length(plan)
    return StepPlan([sequence(plan, length, length, str(n), **RULED) for n in range(_most_sequences(plan))])


def _most_sequences(plan: MemoryPlan) -> int:
    return min(plan.max_running, plan.step_tokens)


def _sequence_length(plan: MemoryPlan) -> int:
    """Return the length of the equal sequences that fill a step."""
    return min(-(-plan.step_tokens // _most_sequences(plan)), plan.context - 1)


def long_prompt(plan: MemoryPlan) -> StepPlan:
    """Build a step with the end of the longest prompt: attention may take memory for its whole context.

    It asks for log-probabilities of all its tokens, for which their final hidden states are kept.
    """
    end = plan.context - 1
    return StepPlan([sequence(plan, end, min(end, plan.step_tokens), "long", **TOLD)])


def decoding(plan: MemoryPlan, count: int, **draws: Any) -> StepPlan:
    end = min(SHORT, plan.context - 1)
    return StepPlan([sequence(plan, end, 1, str(number), **draws) for number in range(count)])


def prompts(plan: MemoryPlan, tokens: int) -> list[ScheduledRequest]:
    """Build rows of `tokens` tokens in as few prompts as the context allows, or fewer tokens if that would be
    more prompts than run at once.
    """
    rows: list[ScheduledRequest] = []
    while tokens > 0 and len(rows) < plan.max_running:
        length = min(tokens, plan.context - 1)
        rows.append(sequence(plan, length, length, f"prompt {len(rows)}"))
        tokens -= length
    return rows


def sequence(plan: MemoryPlan, end: int, tokens: int, name: str, **draws: Any) -> ScheduledRequest:
    """Build the row of the last `tokens` of a context that ends at `end`."""
    params = SamplingParams(max_tokens=1, temperature=0.9, **draws)
    request = Request(request_id=f"trial {name}", prompt_ids=[0] * end, params=params)
    shared = num_warmup_blocks(plan)
    request.block_table = [number % shared for number in range(-(-end // plan.block_size))]
    return ScheduledRequest(request, end - tokens, tokens, samples=True)


def run_warmup(runner: GPUModelRunner, plan: MemoryPlan, row_counts: Sequence[int]) -> int:
    """Run the warm-up steps and return their number. Requests end after each: no runner row stays taken."""
    count = 0
    steps = warmup_steps(plan, row_counts)
    if runner.images is not None:
        steps = chain(steps, image_steps(plan, runner.images))
    for step in steps:
        if isinstance(runner, DeviceHeadRunner):
            step = _of_head(step)  # noqa: PLW2901
            runner.feed_zeros(step.num_tokens)
        runner.collect(runner.launch(step))
        for row in step.rows:
            row.request.admissions += 1
        count += 1
    return count


def _of_head(step: StepPlan) -> StepPlan:
    """Return the rows of a draft head: a request's first token has none, and its blocks are copied with the
    target's.
    """
    rows = [replace(row, start=1, num_tokens=row.end - 1) if not row.start else row for row in step.rows]
    return StepPlan([row for row in rows if row.num_tokens])


def image_steps(plan: MemoryPlan, images: EncodedImages) -> Iterator[StepPlan]:
    """Yield a step with a small image, whose embeddings are zeros."""
    image = trial_image(images.config, 1)
    if image.num_rows + 1 < plan.context:
        row = sequence(plan, image.num_rows + 1, image.num_rows + 1, "image")
        row.request.images = [image]
        piece = image.content_hash, 0, image.num_rows
        yield StepPlan([row], embeddings={piece: bytes(image.num_rows * images.row_bytes)})


def trial_image(vision: VisionConfig, side: int) -> PreparedImage:
    """Return a black image of `side` x `side` embeddings, or of the nearest size that the model takes."""
    size = (side * vision.processor.unit,) * 2
    layout = lay_out_image(vision, *size)
    return PreparedImage(
        content_hash=b"trial",
        tiles=list(layout.tiles),
        pixels=bytes(3 * sum(height * width for height, width in layout.tiles)),
        grid=layout.grid,
        size=size,
        num_tokens=layout.num_rows,
        num_rows=layout.num_rows,
    )
