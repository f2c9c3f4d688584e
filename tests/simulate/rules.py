"""The pass rule: what must hold after a run, and which faults justify which refusal."""

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmbox.app.gateway.generation import choice_seed
from llmbox.app.gateway.open_request import CLIENT_CLOSED
from support.fake_runner import expected_output

from .dialects import DIALECTS_BY_NAME
from .engine import MODEL_BYTES
from .step_rules import BrokenRuleError

if TYPE_CHECKING:
    from llmbox.app.engines.supervisor import Supervisor

    from .clients import Outcome
    from .world import World

EPSILON = 1e-6


def check_outcomes(world: "World") -> None:
    """Each request has one end: its undisturbed tokens, or an error that a fault justifies."""
    for outcome in world.clients.outcomes.values():
        name = outcome.request.id
        if not outcome.status:
            raise BrokenRuleError(f"{name} got no answer")
        check_tokens(world, outcome)
        if outcome.status == "left":
            request = outcome.request
            if request.leaves_after is None and request.leaves_at is None:
                raise BrokenRuleError(f"{name} was cut off, and its client had not left")
        if outcome.error is not None:
            why = refusal_problem(world, outcome)
            if why:
                raise BrokenRuleError(f"{name}: {outcome.error.status} {outcome.error.code}: {why}")


def expected_answer(world: "World", outcome: "Outcome", index: int) -> tuple[list[int], str]:
    """Return the undisturbed tokens of a choice, and why it ends."""
    request = outcome.request
    room = request.max_tokens
    if room is None:
        room = world.setups[request.model].most_tokens - len(request.prompt)
    params = replace(request.params, max_tokens=room, seed=choice_seed(request.params.seed, index))
    tokens = expected_output(request.salt, request.prompt, params)
    stops = tokens and tokens[-1] in params.stop_token_ids and len(tokens) > params.min_tokens
    return tokens, "stop" if stops else "length"


def check_tokens(world: "World", outcome: "Outcome") -> None:
    request = outcome.request
    if outcome.status == "done" and sorted(outcome.reasons) != list(range(request.n)):
        raise BrokenRuleError(f"{request.id}: choices {sorted(outcome.reasons)} of {request.n} ended")
    for index, tokens in outcome.tokens.items():
        expected, reason = expected_answer(world, outcome, index)
        if tokens != expected[: len(tokens)]:
            raise BrokenRuleError(f"{request.id}: choice {index} is {tokens}, undisturbed {expected}")
        text = "".join(chr(48 + token) for token in tokens)
        ends = outcome.reasons.get(index)
        if ends == "stop" and tokens:
            text = text[:-1]  # the stop token is no text
        if outcome.text[index] != text:
            raise BrokenRuleError(f"{request.id}: its text is {outcome.text[index]!r}")
        if ends is None or (tokens == expected and ends == reason):
            continue
        is_cut = (
            request.finish_after is not None
            and outcome.ended >= outcome.arrived + request.finish_after - EPSILON
        )
        if not (is_cut and ends == "length"):
            raise BrokenRuleError(f"{request.id}: choice {index} ends by {ends} after {len(tokens)} tokens")
    if outcome.prompt_logprobs is not None and outcome.prompt_logprobs != request.prompt[1:]:
        raise BrokenRuleError(f"{request.id}: log-probabilities of {outcome.prompt_logprobs}")


def refusal_problem(world: "World", outcome: "Outcome") -> str:
    """Return why no fault justifies the error of a request; empty if one does."""
    assert outcome.error is not None
    request, error, scenario = outcome.request, outcome.error, world.scenario
    passed = outcome.ended - outcome.arrived + EPSILON
    name, setup = request.model, world.setups[request.model]
    is_short_lived = any(each.keep_alive is not None and each.model == name for each in scenario.requests)
    is_unloaded = name in world.unloaded
    loads = scenario.weather == "models" or scenario.ttl is not None or is_unloaded or is_short_lived
    match error.code:
        case "context_length_exceeded":
            dialect = DIALECTS_BY_NAME.get(request.dialect)
            asked = 1 if dialect is not None and dialect.is_clamped else max(request.max_tokens or 1, 1)
            is_right = len(request.prompt) + asked > setup.most_tokens
        case "queue_full":
            room = setup.sizes["max_running"] + scenario.queue_limit
            is_right = outcome.open_choices + request.n > room
        case "first_token_timeout":
            is_right = passed >= min(
                each for each in (request.first_token_after, 1e9) if each is not None
            ) and not any(outcome.tokens.values())
        case "request_timeout":
            is_right = passed >= (1e9 if request.finish_after is None else request.finish_after)
            is_right = is_right and not any(outcome.tokens.values())
        case "invalid_api_key":
            is_right = request.is_revoked_at is not None and passed >= request.is_revoked_at
        case "request_cancelled":
            is_right = (outcome.row or request.id) in world.cancelled
        case "engine_failed":
            is_right = any(failed == name for failed, _ in world.failed_at)
        case "engine_error":
            accused = "repeatedly" in error.message
            is_blamed = request.is_poison or name not in world.blameless
            is_right = is_blamed if accused else _load_failed(world, name)
        case "invalid_value":
            is_right = bool(request.dialect) and request.n > scenario.queue_limit
        case "invalid_logits":
            is_right = "nan" in world.fault_kinds[name]
        case "model_unloaded" | "model_not_found":
            is_right = is_unloaded
        case "model_loading":
            is_right = loads
        case "memory_busy":
            is_right = len(world.setups) * MODEL_BYTES > scenario.memory
        case "model_load_failed" | "does_not_fit":
            is_right = _load_failed(world, name)
        case "previous_response_not_found" | "previous_response_lost" | "request_log_unavailable":
            is_right = bool(request.previous) and scenario.loses_answers
        case "draining" | "server_shutdown" | "shutting_down":
            is_right = world.is_drained_early
        case _:
            is_right = False
    return "" if is_right else f"no fault justifies it ({error.message})"


def _load_failed(world: "World", name: str) -> bool:
    """Return whether an engine of this model died while it loaded, or one that had no model yet."""
    causes = ("load", "spawn", "kill", "oom", "stop")
    deaths = [death for death in world.machine.deaths if death.name in {name, ""}]
    return any(death.cause.startswith(causes) for death in deaths)


def check_room(world: "World", request: Any, before: int, own: int) -> None:
    """The queue is bounded: a request beyond its end is taken only into a place of its caller's own."""
    scenario, sizes = world.scenario, world.setups[request.model].sizes
    room = sizes["max_running"] + scenario.queue_limit
    if before + request.n > room and own + request.n > min(scenario.queue_per_key, room // 2):
        raise BrokenRuleError(f"{request.id} was taken although {before} requests are open, {own} of its own")


def check_failed_state(world: "World", supervisor: "Supervisor") -> None:
    """A model is given up after as many deaths in a minute as allowed, or when its next start fails."""
    now, limits = world.loop.time(), supervisor._options.deaths
    if world.scenario.weather == "poison":
        raise BrokenRuleError(f"{supervisor.name} is given up because of requests that kill")
    if any(name == supervisor.name for name, _ in world.failed_at):
        return
    recent = [
        death
        for death in world.machine.deaths
        if death.name in {supervisor.name, ""} and death.cause and now - death.at < limits.window + 5.0
    ]
    if len(recent) < limits.deaths:
        raise BrokenRuleError(f"{supervisor.name} is given up after {len(recent)} deaths")


def check_rest(world: "World") -> None:
    """Nothing is left of requests once all have ended: no block, place, entry or task."""
    if world.gateway._open or world.background._running:
        left = [*world.gateway._open, *world.background._running]
        raise BrokenRuleError(f"requests go on without a client: {left}")
    for model in world.engines.models():
        supervisor = model.supervisor
        journal, reserved = supervisor._requests, supervisor._reserved
        detector = journal.detector
        kept: dict[str, Any] = {
            "open": journal._open,
            "in_engine": journal._in_engine,
            "cancelled": journal._cancelled,
            "interrupted": journal._interrupted,
            "of_tenant": journal.of_tenant,
            "places": reserved.places or reserved.of_tenant,
            "on trial": detector.open or detector._newcomers or detector._passed,
            "users": model.users,
        }
        if found := {what: value for what, value in kept.items() if value}:
            raise BrokenRuleError(f"{model.name} keeps {found}")
        if supervisor._watchdog._timer is not None:
            raise BrokenRuleError(f"the watchdog of {model.name} goes on without requests")
        if supervisor.state == "failed":
            continue
        process = world.machine.processes.get(supervisor.pid or 0)
        if supervisor.state != "ready" or process is None or process.engine is None:
            raise BrokenRuleError(f"{model.name} is {supervisor.state} although the faults have ended")
        _check_engine(model.name, process.engine)
    if world.loop.failures:
        raise BrokenRuleError("the loop had failures")


def _check_engine(name: str, engine: Any) -> None:
    scheduler = engine.scheduler
    scheduler.check()
    used = scheduler.pool.num_used
    kv_cache = scheduler.kv_cache
    if kv_cache.states is not None:
        used += kv_cache.states.pool.num_used
    flows = [flow for _, flows in scheduler._flows.bands for flow in flows if flow.present or flow.running]
    aside = scheduler._waiting._aside
    if scheduler.has_work or engine._launched or used or flows or aside or kv_cache._premium_held:
        raise BrokenRuleError(f"the engine of {name} keeps requests, {used} blocks, {flows}, {aside}")


def check_after(world: "World") -> None:
    """No process, descriptor, task or timer outlives the daemon's end."""
    machine = world.machine
    if alive := [process.pid for process in machine.processes.values() if process.exited is None]:
        raise BrokenRuleError(f"processes {alive} outlive the daemon")
    if unreaped := [process.pid for process in machine.processes.values() if process.returncode is None]:
        raise BrokenRuleError(f"processes {unreaped} are not reaped")
    if machine.descriptors:
        raise BrokenRuleError(f"descriptors are leaked: {machine.descriptors}")
    here = asyncio.current_task()
    if tasks := [task.get_name() for task in world.loop.tasks if task is not here]:
        raise BrokenRuleError(f"tasks are leaked: {tasks}")
    timers = [each for each in world.loop.timers if "timeout" not in each.lower()]
    ours = ("Strand", "VirtualProcess", "_feed")
    timers = [each for each in timers if not any(name in each for name in ours)]
    if timers:
        raise BrokenRuleError(f"timers are leaked: {timers}")


def check_records(world: "World") -> None:
    """The request log has one row for each request that reached the gateway, with its true end."""
    rows, lost = world.read_log(), world.request_log.dropped
    if lost and not world.scenario.loses_answers:
        raise BrokenRuleError(f"{lost} rows of the request log are lost")
    for outcome in world.clients.outcomes.values():
        name, dialect = outcome.request.id, outcome.request.dialect
        found = rows.pop(name, [])
        if outcome.row:
            found += rows.pop(outcome.row, [])
        is_logged = outcome.error is None or outcome.error.code != "shutting_down"
        if dialect and outcome.status == "error" and is_logged and not (outcome.is_open or found or lost):
            raise BrokenRuleError(f"{name} was refused, and the request log has no row of it")
        if outcome.is_open and not found and lost:
            lost -= 1
            continue
        if len(found) > 1 or (outcome.is_open and not found):
            raise BrokenRuleError(f"{name} has {len(found)} rows in the request log")
        if not outcome.is_open:
            continue
        (row,) = found
        is_half_read = outcome.request.stored is not None and row.http_status == CLIENT_CLOSED
        if dialect and (outcome.status != "done" or is_half_read):  # cancelled, it had all its tokens
            _check_cut_answer(outcome, row)
            continue
        status = {"done": 200, "left": 499}.get(outcome.status) or getattr(outcome.error, "status", None)
        if row.http_status != status:
            raise BrokenRuleError(f"{name}: status {row.http_status} in the request log, sent was {status}")
        count = sum(map(len, outcome.tokens.values()))
        if row.output_tokens != count:
            raise BrokenRuleError(f"{name}: {row.output_tokens} tokens in the request log, sent were {count}")
        _check_resumes(world, outcome, row.resumes)
    if rows:
        raise BrokenRuleError(f"rows of nobody: {list(rows)}")


def _check_cut_answer(outcome: "Outcome", row: Any) -> None:
    """The row of an answer over HTTP that its client has not got whole.

    A client that leaves may have had its answer on the way, or an error; one that does not read a stream gets
    no part of an answer that fails.
    """
    name, told = outcome.request.id, row.http_status
    if outcome.error is not None and (told < 400 or outcome.error.status not in {0, told}):
        raise BrokenRuleError(f"{name}: status {told} in the request log, sent was {outcome.error}")
    if row.output_tokens < sum(map(len, outcome.tokens.values())):
        raise BrokenRuleError(f"{name}: more tokens came than the request log has")


def _check_resumes(world: "World", outcome: "Outcome", resumes: int) -> None:
    times, request = outcome.token_times, outcome.request
    deaths = [death for death in world.machine.deaths if death.name == request.model]
    if resumes > len(deaths):
        raise BrokenRuleError(f"{request.id} was resumed {resumes} times, {len(deaths)} engines died")
    spanned = [d for d in deaths if d.is_of_model and times and times[0] < d.at < times[-1] - 1.0]
    if spanned and not resumes and request.n == 1 and not request.read_pause:
        raise BrokenRuleError(f"{request.id} does not count as resumed")


NOTICE_S = 4 * 2.5 + 2.5 + 2.5
"""Seconds within which a dead hang is noticed: four silent ticks, the one before them, the one it fell in."""


def check_kills(world: "World") -> None:
    """The daemon kills only engines that do not answer, soon where they stand still, and those it unloads."""
    for at, _, text in world.log:
        if found := re.match(r"engine (\S+): no progress for (\d+) s", text):
            dead = [d for d in world.machine.deaths if d.name == found[1] and abs(d.at - at) < EPSILON]
            if (dead[0].cause if dead else "") not in {"load hang", "stop"}:
                raise BrokenRuleError(f"{found[1]} was killed although its load went on: {text}")
        if found := re.match(r"engine (\S+): no answer for (\d+) s", text):
            name, seconds = found[1], float(found[2])
            dead = [d for d in world.machine.deaths if d.name == name and abs(d.at - at) < EPSILON]
            cause = dead[0].cause.removeprefix("poison ") if dead else ""
            if cause not in {"hang", "spin", "stop", "garble"} and seconds < 299:
                raise BrokenRuleError(f"{name} was killed although it computed: {text}")
            if cause == "hang" and seconds > NOTICE_S and not world.fault_kinds[name] & {"slow", "starve"}:
                raise BrokenRuleError(f"{name} hung for {seconds} s before it was killed")


def check_log(world: "World") -> None:
    """Each death of an engine has its cause in the daemon's log."""
    for name, death, supervisor in world.must_be_logged:
        if supervisor.state == "stopped" and not _was_logged(world, name, death):
            continue  # it was unloaded at that moment
        if not _was_logged(world, name, death):
            raise BrokenRuleError(f"the log does not say that {name} died by {death.cause!r}: {death.said}")


def _was_logged(world: "World", name: str, death: Any) -> bool:
    return any(
        death.at <= at <= death.at + 5.0
        and f" {name} " in text
        and (death.said in text or "exited with" in text)
        and ("died" in text or "could not" in text)
        for at, _, text in world.log
    )
