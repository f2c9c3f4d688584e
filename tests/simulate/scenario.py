"""Scenarios: what clients ask and what goes wrong when, drawn from a seed."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from llmbox.engine.sampling_params import SamplingParams

from .dialects import DIALECTS_BY_NAME, OllamaChat
from .disks import LOG_FAULTS, READ_FAULTS, WRITE_FAULTS
from .engine import LOAD_ALLOCATIONS, MODEL_BYTES, POISON, ModelSetup
from .stored_clients import StoredPlan, draw_plan

Weather = Literal["calm", "crowd", "poison", "outside", "storm", "models"]
"""Kinds of runs: `calm` and `crowd` have no faults of the machine and the strictest rules, `poison` has only
requests that kill the engine, `outside` only deaths that no request can be blamed for, `storm` everything at
once, `models` more models than fit."""

WEATHERS: tuple[Weather, ...] = ("calm", "crowd", "poison", "outside", "storm", "models")
HTTP_SHARE = 0.15
"""Share of runs in which requests ask over HTTP."""
STORED_SHARE = 0.04
"""Share of runs in which responses are stored, or made in the background."""
TENANTS = ("ann", "bob", "cat")


@dataclass(slots=True, kw_only=True)
class RequestSetup:
    """One request of a client, and how the client behaves."""

    id: str
    model: str
    at: float
    prompt: list[int]
    params: SamplingParams
    max_tokens: int | None
    n: int = 1
    tenant: str = ""
    priority: int = 0
    salt: str = ""
    preparing: float = 0.0
    """Seconds from its place in the queue to its submission."""
    read_pause: float = 0.0
    """Seconds that the client waits after each delta."""
    leaves_after: int | None = None
    """Deltas after which the client hangs up."""
    leaves_at: float | None = None
    """Seconds after its arrival at which the client hangs up, whatever it waits for."""
    finish_after: float | None = None
    first_token_after: float | None = None
    is_revoked_at: float | None = None
    dialect: str = ""
    """Dialect of HTTP in which it asks: a key of `DIALECTS_BY_NAME`. Empty: it stands for a route itself."""
    keep_alive: float | None = None
    """Seconds that its model stays unused from now on. In Ollama's dialects alone."""
    streams: bool = True
    """It reads the answer as a stream. Over HTTP alone; else it always does."""
    stored: StoredPlan | None = None
    """Its answer is stored. With the dialect `responses` alone."""
    previous: str = ""
    """Id of the stored response that it goes on from."""
    num_known: int = 0
    """First tokens of its prompt, which the daemon has of that response."""

    @property
    def is_poison(self) -> bool:
        return POISON in self.prompt


@dataclass(slots=True, kw_only=True)
class MachineEvent:
    """Something that happens to the machine, or an order of its operator, at a virtual time."""

    at: float
    kind: str
    model: str = ""
    value: float = 0.0


@dataclass(slots=True, kw_only=True)
class Scenario:
    seed: int
    weather: Weather
    models: list[ModelSetup]
    requests: list[RequestSetup]
    events: list[MachineEvent] = field(default_factory=list)
    queue_limit: int = 512
    queue_per_key: int = 64
    latency: float = 0.0005
    capacity: int = 1 << 30
    keep_spare: bool = False
    forks: bool = False
    """Processes are forked from a server, where a spare is kept; else the spare is taken."""
    ttl: float | None = None
    log_faults: dict[int, str] = field(default_factory=dict)
    """By the number of the insert into the request log. With `writes_log` alone."""
    stored_faults: dict[int, str] = field(default_factory=dict)
    """By the number of the answer that is stored."""
    writes_log: bool = False
    """The request log has its thread and its file; else its queue is read at the end."""
    write_faults: dict[int, str] = field(default_factory=dict)
    read_faults: dict[int, str] = field(default_factory=dict)
    """Faults of the disk by the number of the write, and of the read."""
    memory: int = 1 << 40
    """Bytes that models may take together."""
    drain: float = 30.0

    @property
    def available(self) -> int:
        """Bytes that are free beside those of models: for both at once, in half of all runs."""
        return self.memory * (len(self.requests) % 2)

    @property
    def loses_answers(self) -> bool:
        """The disk may lose answers that were stored, or hold up those who ask for them."""
        return bool(self.log_faults or self.stored_faults)

    @property
    def has_faults(self) -> bool:
        return self.weather not in {"calm", "crowd"}

    def step_faults(self, name: str) -> set[str]:
        """Kinds of faults in steps of a model."""
        return {kind for setup in self.models if setup.name == name for kind in setup.step_faults.values()}

    def event_kinds(self, name: str) -> set[str]:
        """Kinds of what happens to a model, or to the machine."""
        return {event.kind for event in self.events if event.kind == "starve" or event.model == name}

    def blames_nobody(self, name: str) -> bool:
        """No engine of this model dies in a way that a request can be blamed for, but for poison."""
        inside = {
            "inside",
            "raise",
            "memory",
            "after",
            "collect",
            "segv",
            "oom",
            "spin",
            "hang",
            "slow",
            "garble",
        }
        events = self.event_kinds(name) & {"oom", "starve", "hang"}
        return not (events or self.step_faults(name) & inside)


def draw_scenario(seed: int, weather: Weather | None = None) -> Scenario:
    chance = Random(seed)
    drawn = chance.choices(WEATHERS, (2, 2, 2, 2, 5, 2))[0]
    weather = weather or drawn
    names = ["m0"] if weather != "models" else ["m0", "m1", "m2"][: chance.randint(2, 3)]
    models = [_draw_model(chance, name, weather) for name in names]
    span = chance.choice([0.5, 5.0, 60.0, 400.0])
    scenario = Scenario(
        seed=seed,
        weather=weather,
        models=models,
        requests=_draw_requests(chance, models, weather, span),
        latency=chance.choice([0.0001, 0.0005, 0.002]),
        keep_spare=chance.random() < 0.3,
        ttl=chance.choice([None, 5.0, 300.0]),
        drain=chance.choice([0.0, 5.0, 30.0]),
    )
    scenario.forks = scenario.keep_spare and chance.random() < 0.5
    if chance.random() < 0.4:
        scenario.queue_limit = chance.randint(0, 6)
        scenario.queue_per_key = chance.randint(0, 3)
    if chance.random() < 0.2:
        scenario.capacity = chance.choice([300, 2000])
        for model in models:
            model.outbox_limit = chance.choice([100, 5000])
    if weather == "models":
        scenario.memory = chance.choice([1, 2]) * MODEL_BYTES + MODEL_BYTES // 2
    if scenario.has_faults:
        _draw_faults(chance, scenario, span)
    scenario.writes_log = chance.random() < 0.1
    if scenario.has_faults:
        _draw_disk_faults(chance, scenario)
    # From streams of their own: what older seeds draw stays the same.
    if weather == "models":
        exits = Random(f"exit {seed}")
        for model in models:
            model.exit_seconds = exits.choice([0.0, 0.0, 0.05, 1.0])
    if weather == "poison":
        _draw_more_poison(Random(f"poison {seed}"), scenario.requests)
    _draw_dialects(Random(f"http {seed}"), scenario.requests)
    _draw_stored(Random(f"stored {seed}"), scenario)
    return scenario


def _draw_dialects(chance: Random, requests: list[RequestSetup]) -> None:
    """Have some of the requests of some runs ask over HTTP."""
    if chance.random() > HTTP_SHARE:
        return
    for request in requests:
        name = chance.choice(["", "", *DIALECTS_BY_NAME])
        if not name or not _may_ask_over_http(request):
            continue
        _ask_over_http(chance, request, name)
        if isinstance(DIALECTS_BY_NAME[name], OllamaChat) and chance.random() < 0.2:
            request.keep_alive = chance.choice([0.0, 0.5, 5.0])


def _may_ask_over_http(request: RequestSetup) -> bool:
    return request.is_revoked_at is None and request.params.prompt_logprobs is None


def _ask_over_http(chance: Random, request: RequestSetup, name: str) -> None:
    dialect = DIALECTS_BY_NAME[name]
    request.dialect, request.streams = name, chance.random() < 0.8
    least = min(request.params.min_tokens, request.max_tokens or 2)  # more is refused
    request.params = replace(request.params, min_tokens=least)
    if not dialect.has_fields:
        request.params = replace(request.params, min_tokens=0, stop_token_ids=())
        request.n, request.priority, request.salt = 1, 0, ""
        request.finish_after = request.first_token_after = None
    if dialect.needs_limit:
        request.max_tokens = request.max_tokens or 12


def _draw_stored(chance: Random, scenario: Scenario) -> None:
    """Have some of the requests of some runs ask for responses that are stored."""
    if chance.random() > STORED_SHARE:
        return
    scenario.writes_log = True
    for request in scenario.requests:
        if chance.random() < 0.6 and _may_ask_over_http(request):
            _ask_over_http(chance, request, "responses")
            plan = draw_plan(chance)
            request.stored = replace(plan, goes_on=request.params.seed % 2 == 0 and not plan.forgets)
            request.keep_alive = None
            if request.streams and chance.random() < 0.4:  # it comes back for the rest of the events
                request.leaves_after = chance.randint(0, 4)
    end = max((request.at for request in scenario.requests), default=0.0) + 5.0
    if scenario.has_faults:
        for _ in range(chance.choice([0, 1, 1, 2])):
            at = chance.choice([chance.random(), chance.random() * end])
            scenario.events.append(MachineEvent(at=at, kind="daemon"))
        for _ in range(chance.choice([0, 0, 0, 2])):
            scenario.stored_faults[chance.randint(1, 12)] = chance.choice(("full", "locked", "slow"))
        scenario.events.sort(key=lambda event: event.at)


def _draw_more_poison(chance: Random, requests: list[RequestSetup]) -> None:
    """Poison up to three more, but no more than half of all."""
    healthy = [request for request in requests if not request.is_poison]
    room = len(healthy) - len(requests) // 2
    for request in chance.sample(healthy, max(0, min(room, chance.choice([0, 0, 1, 3])))):
        request.prompt.insert(chance.randint(0, len(request.prompt)), POISON)


def _draw_disk_faults(chance: Random, scenario: Scenario) -> None:
    if scenario.writes_log:
        for _ in range(chance.choice([0, 1, 3])):
            scenario.log_faults[chance.randint(1, 6)] = chance.choice(LOG_FAULTS)
    if not any(model.has_tiers for model in scenario.models):
        return
    for _ in range(chance.choice([0, 1, 4, 12])):
        scenario.write_faults[chance.randint(1, chance.choice([5, 60]))] = chance.choice(WRITE_FAULTS)
        scenario.read_faults[chance.randint(1, chance.choice([5, 40]))] = chance.choice(READ_FAULTS)


def _draw_model(chance: Random, name: str, weather: Weather) -> ModelSetup:
    block_size = chance.choice([1, 2, 4, 4, 8])
    slots = chance.choice([48, 64, 96, 240])
    max_running = chance.randint(1, 5)
    sizes: dict[str, Any] = {
        "num_blocks": slots // block_size,
        "block_size": block_size,
        "context": min(slots, chance.choice([40, 60])),
        "max_running": max_running,
        "token_budget": max_running + chance.choice([0, 2, 8, 30]),
        "cache": chance.random() < 0.8,
        "chunked_prefill": chance.random() < 0.85,
        "batching": "static" if chance.random() < 0.08 else "continuous",
        "premium_share": chance.choice([0.0, 0.0, 0.25]),
        "watermark": chance.choice([0.0, 0.0, 0.01, 0.1]),
        "ageing_seconds": chance.choice([0.2, 10.0]),
    }
    stages, depth = chance.choice([(1, 0)] * 4 + [(1, 1), (2, 1), (2, 2), (3, 2)])
    if depth:
        sizes |= {"stages": stages, "depth": depth}
        sizes["token_budget"] = max(sizes["token_budget"], stages * max_running)
    elif chance.random() < 0.3:
        sizes["draft_rows"] = chance.choice([3, 9])
    if chance.random() < 0.15:
        sizes["state_slots"] = max_running + chance.choice([1, 9])
    has_tiers = not depth and not sizes.get("state_slots") and sizes["cache"] and chance.random() < 0.25
    return ModelSetup(
        name=name,
        sizes=sizes,
        has_tiers=has_tiers,
        step_seconds=chance.choice([0.002, 0.02, 0.2]),
        load_seconds=chance.choice([0.1, 2.0, 20.0]),
        poison=chance.choice(["raise", "segv", "oom", "hang", "memory", "after"])
        if weather == "poison"
        else "raise",
        poison_after=chance.choice([0, 0, 1, 3]),
    )


def _draw_requests(
    chance: Random, models: list[ModelSetup], weather: Weather, span: float
) -> list[RequestSetup]:
    prefixes = [[chance.randrange(6) for _ in range(chance.choice([4, 8, 20]))] for _ in range(3)]
    crowd = weather == "crowd"
    requests = []
    poisons = (
        chance.randint(1, 3) if weather == "poison" else int(weather == "storm" and chance.random() < 0.3)
    )
    count = chance.randint(20, 40) if crowd else chance.randint(3, 18)
    at = 0.0 if chance.random() < 0.3 else None
    flat = chance.random() < 0.4
    for number in range(count):
        model = chance.choice(models)
        context = model.sizes["context"]
        prompt = list(chance.choice(prefixes)) if chance.random() < 0.6 else []
        prompt += [chance.randrange(6) for _ in range(chance.randint(0 if prompt else 1, 12))]
        limit = chance.choice([1, 3, 8, 8, 20, None, 200 if chance.random() < 0.1 else 12])
        if crowd:
            prompt, limit = prompt[:6], chance.choice([2, 5, 8])
        if chance.random() < 0.02:
            prompt += [1] * context
        if number < poisons:
            prompt.insert(chance.randint(0, len(prompt)), POISON)
        prompt = prompt[: context + 5]
        requests.append(
            RequestSetup(
                id=f"q{number}",
                model=model.name,
                at=chance.random() * span if at is None else at,
                prompt=prompt,
                params=SamplingParams(
                    max_tokens=0,
                    seed=chance.randrange(1000),
                    temperature=chance.choice([0.0, 1.0]),
                    min_tokens=chance.choice([0, 0, 2]),
                    stop_token_ids=chance.choice([(), (), (3,), (7, 11)]),
                    prompt_logprobs=chance.choice([None] * 9 + [1]),
                ),
                max_tokens=limit,
                n=chance.choice([1] * 8 + [2, 3]),
                tenant=chance.choice(TENANTS),
                priority=0 if flat else chance.choice([0, 0, 0, -1, 1, -9, 2]),
                salt=chance.choice(["", "", "", "s"]),
                preparing=chance.choice([0.0, 0.0, 0.01, 1.0]),
                **_draw_behavior(chance),
            )
        )
    return requests


def _draw_behavior(chance: Random) -> dict[str, Any]:
    """Draw what the client does beside waiting for its answer."""
    match chance.randrange(12):
        case 0:
            return {"leaves_after": chance.randint(0, 6)}
        case 1:
            return {"leaves_at": chance.choice([0.0, 0.05, 1.0, 10.0])}
        case 2:
            return {"read_pause": chance.choice([0.01, 1.0])}
        case 3:
            return {"finish_after": chance.choice([0.1, 2.0, 30.0])}
        case 4:
            return {"first_token_after": chance.choice([0.1, 2.0, 30.0])}
        case 5 if chance.random() < 0.3:
            return {"is_revoked_at": chance.choice([0.0, 1.0, 10.0])}
    return {}


def _draw_faults(chance: Random, scenario: Scenario, span: float) -> None:
    weather, events = scenario.weather, scenario.events
    blameless = ["kill", "stop", "spawn", "load", "jump", "unload", "cancel", "load_kill", "fork", "server"]
    outside = {
        "poison": ["jump", "cancel"],
        "outside": blameless,
        "models": [*blameless, "slow"],
        "storm": [*blameless, "oom", "starve", "hang"],
    }[weather]
    end = max((request.at for request in scenario.requests), default=0.0) + 5.0
    for _ in range(chance.choice([0, 1, 2, 4, 8])):
        setup = chance.choice(scenario.models)
        kind = chance.choice(outside)
        if kind == "load":
            setup.load_faults[chance.randint(2, 4)] = chance.choice(
                ["fit", "raise", "kill", "memory", "hang"]
            )
            setup.load_faults_at = chance.randint(1, LOAD_ALLOCATIONS)
            continue
        value = {
            "stop": chance.choice([1.0, 7.0, 1e6]),
            "jump": chance.choice([-1e5, -1.0, 3600.0, 1e7]),
            "starve": chance.choice([2.0, 30.0]),
            "spawn": chance.randint(1, 3),
            "fork": chance.randint(1, 3),
        }.get(kind, 0.0)
        events.append(MachineEvent(at=chance.random() * end, kind=kind, model=setup.name, value=value))
    steps = {
        "poison": [],
        "outside": ["kill", "nan"],
        "models": ["kill"],
        "storm": [
            "kill",
            "raise",
            "memory",
            "inside",
            "after",
            "collect",
            "segv",
            "oom",
            "hang",
            "spin",
            "slow",
            "garble",
            "nan",
        ],
    }[weather]
    if steps:
        for _ in range(chance.choice([0, 1, 1, 3, 6])):
            setup = chance.choice(scenario.models)
            kind = chance.choice(steps)
            if kind == "collect" and not setup.sizes.get("depth"):
                kind = "raise"
            setup.step_faults[chance.randint(1, chance.choice([5, 40, 150]))] = kind
    if weather != "poison" and chance.random() < 0.08:
        wait = chance.choice([0.0, 1.0, 60.0])
        events.append(MachineEvent(at=chance.random() * end, kind="drain", value=wait))
    events.sort(key=lambda event: event.at)
