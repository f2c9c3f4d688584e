"""Gateway: checks requests against the model, submits them to the engine, lists and records them."""

import hashlib
import time
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import msgspec

from llmbox import __version__
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest, ModelInfo

from ..config.entries import find_price
from ..config.settings import Settings
from ..engines.loaded_model import LoadedModel
from ..engines.manager import EngineManager
from ..errors import ApiError
from ..images.reader import ImageReader
from ..metrics import Metrics
from ..sandbox.pool import GrammarPool, TemplatePool
from ..security.rate_limit import TokenReservation
from ..security.security import tier_of
from ..store import RequestLog
from ..store.record import ContentDraft, LiveRequest, RequestRecord
from ..tracing.tracer import RequestTracer
from ..util.threads import in_thread
from .choice_stream import AnswerBuffer, ChoiceStream, OutputHasher
from .generation import Generation, choice_seed, params_json, sequence_id
from .open_request import OpenRequest, RequestObserver, RevocationWatcher
from .request_times import ExchangeClock, call_after_times, sequence_records
from .target_admission import TargetAdmission


def check_generates(model: LoadedModel) -> None:
    """Raise ApiError 400 for a model that does not generate text."""
    if not model.info.generates:
        raise ApiError(
            400,
            f"{model.name} makes embeddings or scores, not text: send the request to /v1/embeddings or "
            "/v1/rerank, or name another model.",
            code="generation_not_supported",
            param="model",
        )


def max_in_engine(model: LoadedModel, choices: int, *, pools: bool, queue: int) -> int:
    """Maximum number of a request's choices that are in the engine at once.

    An embeddings request may have thousands of inputs. The engine gets enough of them to stay busy, and other
    requests need not wait behind all of them. `queue`: requests that may wait for a model.
    """
    if not pools:
        return choices
    running = model.info.max_running
    return min(choices, running + min(running, queue))


class Gateway:
    """Entry point for checked requests. Use it only from the event loop."""

    def __init__(
        self,
        engines: EngineManager,
        log: RequestLog,
        metrics: Metrics,
        settings: Settings,
        observer: RequestObserver | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.engines = engines
        self.limits = settings.limits
        self.admission = TargetAdmission(metrics, settings)
        self.templates = TemplatePool()
        self.grammars = GrammarPool()
        self.images = ImageReader()
        self._log = log
        self._metrics = metrics
        self._observer = observer or RequestObserver()
        self.tracer = tracer or RequestTracer()
        self._open: dict[str, OpenRequest] = {}
        self._revocation = RevocationWatcher(self._open)
        self._engine_ids = 0
        self._hasher = OutputHasher(log.path.with_name("output-hash.key"))
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Apply the settings that a reload changes while requests run."""
        self.prices = settings.usage.prices
        """Prices of tokens, for the budgets of keys."""
        self.fetches_images = settings.server.fetch_images
        """True if images of http and https URLs are fetched."""
        self.admission.apply(settings)

    def open(self, generation: Generation) -> OpenRequest:
        """Submit every choice, or none. Read the result inside `with`. Raises ApiError 400, 409, 429, 503."""
        try:
            return self._submit(generation)
        except ApiError as error:
            name, key = generation.model.name, generation.key
            self.record_refusal(
                generation.id, generation.endpoint, name, error, key=key, clock=generation.clock
            )
            raise

    def in_flight(self) -> list[LiveRequest]:
        """Open requests, oldest first."""
        return [request.live() for request in self._open.values()]

    @property
    def open_count(self) -> int:
        return len(self._open)

    def cancel(self, request_id: str) -> bool:
        found = self._open.get(request_id)
        if found is not None:
            found.cancel()
        return found is not None

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def record_refusal(
        self,
        request_id: str,
        endpoint: str,
        model: str,
        error: ApiError,
        *,
        key: str = "",
        clock: ExchangeClock | None = None,
    ) -> None:
        """Record a request that was refused before it reached an engine."""
        self._metrics.record_refusal(error.code or str(error.status))
        record = RequestRecord(
            id=request_id,
            created=time.time(),
            model=model,
            endpoint=endpoint,
            http_status=error.status,
            key=key,
            error_code=error.code or "",
            trace_id=_trace_id(clock),
        )
        self._metrics.record_failure(record)
        self._log.write(record)
        self._observer.on_refusal(record, error.message)
        if clock is not None:
            self.tracer.export_request(record, clock.trace, clock.began)

    def output_hash(self, request: OpenRequest) -> str:
        return self._hasher.of([sequence.output_ids for sequence in request.sequences])

    async def close(self) -> None:
        self._revocation.close()
        await self.templates.close()
        await self.grammars.close()
        await self.images.close()
        # Executors take no work at the exit of the interpreter, where an `LLM` that nobody closed gets here.
        await in_thread(self.tracer.close, "tracer close")

    def _admit(self, generation: Generation) -> int:
        """Return how many choices of the request the engine gets at once. Raises ApiError 400, 409, 429 and
        503.
        """
        pools = generation.params.pooling is not None
        if not pools:
            check_generates(generation.model)
        choices = len(generation.prompts) * generation.n
        at_once = max_in_engine(generation.model, choices, pools=pools, queue=self.limits.queue)
        if generation.reservation is not None:
            generation.reservation.release()
        generation.model.supervisor.check_room(at_once, generation.tenant)
        if generation.id in self._open:
            raise ApiError(
                409,
                f"A request with the id {generation.id} is open.",
                code="request_id_in_use",
                param="request_id",
            )
        return at_once

    def _submit(self, generation: Generation) -> OpenRequest:
        at_once, supervisor = self._admit(generation), generation.model.supervisor
        messages = self._messages(generation)
        reservation = _reserve_tokens(generation, messages, self.prices)
        submitted = (
            ChoiceStream(index, generation, supervisor.submit(message))
            for index, message in enumerate(messages)
        )
        try:
            if self.admission.targets:
                self.admission.check(generation, messages)
            sequences = list(islice(submitted, at_once))
        except ApiError:
            supervisor.queue.forget(messages)
            self.admission.forecasts.pop(generation.id, None)
            if reservation is not None:
                reservation.cancel(sum(map(len, generation.prompts)))
            raise
        model, tier = generation.model.name, tier_of(generation.priority)
        opened = OpenRequest(
            generation,
            sequences,
            self._ended,
            partial(self._metrics.inter_token_observer, model, tier),
            AnswerBuffer(len(messages), self._log.content_bytes) if generation.keep is not None else None,
            submitted,
            reservation,
        )
        self._open[generation.id] = opened
        if generation.image_lease is not None:
            generation.image_lease.is_submitted = True
        self._revocation.watch(opened)
        self._observer.on_open(opened.live())
        return opened

    def _messages(self, generation: Generation) -> list[AddRequest]:
        messages = []
        for number, prompt in enumerate(generation.prompts):
            room = max_new_tokens(generation, prompt)
            pair_start = generation.pair_starts[number] if generation.pair_starts else None
            first: str | None = None
            for index in range(generation.n):
                self._engine_ids += 1
                engine_id = sequence_id(generation.id, self._engine_ids)
                seed = choice_seed(generation.params.seed, index)
                messages.append(
                    AddRequest(
                        request_id=engine_id,
                        prompt_ids=prompt,
                        params=replace(generation.params, max_tokens=room, seed=seed, pair_start=pair_start),
                        priority=generation.priority,
                        tenant=generation.tenant,
                        cache_namespace=generation.cache_salt,
                        adapter=generation.model.adapter,
                        fork_of=first,
                        images=generation.images,
                    )
                )
                first = first or engine_id
        return messages

    def _ended(self, request: OpenRequest, status: int, code: str) -> None:
        self._open.pop(request.generation.id, None)
        if (lease := request.generation.image_lease) is not None:
            lease.release()
        record = _record(request, status, code, self.output_hash(request))
        if self.admission.forecasts:
            self.admission.settle(record, request.timeline.waited, request.generation.clock.model_s)
        self._metrics.record_request(record, request.timeline.waited)
        self._write(request, record)
        self._observer.on_end(record, request.reason)

    def _write(self, request: OpenRequest, record: RequestRecord) -> None:
        """Log a request with the times of its sequences, or without those that the engine reports later."""
        ended, clock = time.monotonic(), request.generation.clock

        def late() -> None:
            times = sequence_records(request, ended)
            self._log.write_times(record, times)
            self.tracer.export_phases(clock.trace, times, clock.began)

        waits = call_after_times([each.stream for each in request.sequences], late)
        times = [] if waits else sequence_records(request, ended)
        self._log.write(record, _draft(request), times)
        self.tracer.export_request(record, clock.trace, clock.began)
        self.tracer.export_phases(clock.trace, times, clock.began)


def _reserve_tokens(
    generation: Generation, messages: list[AddRequest], prices: tuple[str, ...]
) -> TokenReservation | None:
    """Reserve the request's tokens in its key's rate limit and quotas. Raises ApiError 429."""
    if generation.meter is None:
        return None
    unbounded = generation.max_tokens is None and generation.params.pooling is None
    return generation.meter.reserve_tokens(
        sum(map(len, generation.prompts)),
        sum(message.params.max_tokens for message in messages),
        choices=len(messages) if unbounded else 0,
        price=find_price(prices, generation.model.name),
    )


def max_new_tokens(generation: Generation, prompt: list[int]) -> int:
    """Tokens that a choice may generate: as requested, or all that the context leaves. Raises ApiError
    400.
    """
    limit = model_limit(generation.model)
    wanted = generation.max_tokens
    if generation.params.pooling is not None and len(prompt) <= limit:
        return 0
    if wanted and generation.max_tokens_clamped and len(prompt) < limit:
        return min(wanted, limit - len(prompt))
    if len(prompt) + max(wanted or 1, 1) <= limit:
        return limit - len(prompt) if wanted is None else max(wanted, 1)
    asked = f" and {wanted} of output" if wanted else ""
    too_long = len(prompt) >= limit
    raise ApiError(
        400,
        f"This model's context is {limit} tokens, but the request needs {len(prompt)} of prompt{asked}. "
        + (
            "Shorten the prompt."
            if too_long
            else f"Ask for at most {limit - len(prompt)} tokens of output in '{generation.max_tokens_param}'."
        ),
        code="context_length_exceeded",
        param=generation.prompt_param if too_long else generation.max_tokens_param,
    )


def model_limit(model: LoadedModel) -> int:
    """Context limit of a model, lowered by the alias that was used."""
    limit = context_limit(model.info)
    return min(limit, model.context_cap or limit)


def context_limit(info: ModelInfo) -> int:
    """Longest prompt + output of one request: the context window, or the KV cache where that holds fewer
    tokens.
    """
    return min(info.context_window, info.num_blocks * info.block_size)


def system_fingerprint(model: LoadedModel) -> str:
    """Hash that changes with the build or the effective settings, and so when answers to the same seed may
    change.
    """
    return _fingerprint(model.config, model.supervisor.info, Path(model.adapter).name)


@lru_cache(maxsize=64)
def _fingerprint(config: EngineConfig, info: ModelInfo | None, adapter: str) -> str:
    facts = {} if info is None else asdict(info)
    for varying in ("load_seconds", "measured_weights_bytes", "gpus", "worker_pids"):
        facts.pop(varying, None)
    encoded = msgspec.json.encode(
        [__version__, asdict(config), facts, *filter(None, [adapter])], order="sorted"
    )
    return "fp_" + hashlib.sha256(encoded).hexdigest()[:12]


def _draft(request: OpenRequest) -> ContentDraft | None:
    generation, transcript = request.generation, request.transcript
    if generation.keep is None or transcript is None:
        return None
    text = generation.model.text
    ids = generation.prompts
    return ContentDraft(
        owner=generation.keep.owner,
        body=generation.keep.body,
        prompts=lambda: [text.decode(prompt, skip_special=False) for prompt in ids],
        outputs=transcript.texts,
        output_bytes=transcript.size,
        size=len(generation.keep.body) + 12 * sum(map(len, ids)) + transcript.size,
    )


def _record(request: OpenRequest, status: int, code: str, output_hash: str) -> RequestRecord:
    generation, clock, usage = request.generation, request.timeline, request.usage
    first, last = clock.first_token, clock.last_token
    longest = max(sequence.output_tokens for sequence in request.sequences)
    pools = generation.params.pooling is not None
    reasons = [sequence.finish_reason or "abort" for sequence in request.sequences]
    decoded = longest > 1 and first is not None and last is not None
    return RequestRecord(
        id=generation.id,
        created=clock.created,
        model=generation.model.name,
        endpoint=generation.endpoint,
        key=generation.key,
        tier=tier_of(generation.priority),
        stream=generation.stream,
        http_status=status,
        finish_reasons=",".join(dict.fromkeys(reasons) if pools else reasons),
        error_code=code,
        n=generation.n,
        queue_s=None if clock.scheduled is None else max(0.0, clock.scheduled - clock.submitted),
        ttft_s=None if first is None else first - clock.began,
        tpot_s=(last - first) / (longest - 1) if decoded and first is not None and last is not None else None,
        e2e_s=time.monotonic() - clock.began,
        resumes=request.resumes,
        seed=None if pools else generation.params.seed,
        params=params_json(generation),
        client=generation.client,
        prefix_end=request.prefix_end,
        output_hash=output_hash,
        fingerprint=system_fingerprint(generation.model),
        trace_id=_trace_id(generation.clock),
        content="kept" if generation.keep is not None else "",
        **usage.counts(),
    )


def _trace_id(clock: ExchangeClock | None) -> str:
    return "" if clock is None or clock.trace is None else clock.trace.trace_id
