import asyncio
import os
import signal
import time

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.sandbox import pool as worker_pool
from llmbox.app.sandbox.pool import TemplatePool, job
from llmbox.app.util.threads import TENANT
from support.engines import until


@pytest.fixture
async def pool():
    pool = TemplatePool(size=2)
    yield pool
    await pool.close()


async def test_renders_with_the_helpers_of_transformers(pool):
    template = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}|{{ messages | tojson }}|"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}|"
        "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}|{{ strftime_now('%Y')|length }}"
    )
    text = await pool.render(job(template, {"messages": [{"content": "<é>"}]}))
    assert text == '<é>|[{"content": "<é>"}]|01|2|4'


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**9 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].append(1) }}",
        "{% if %}",
        "{{ 3 ** (10 ** 9) }}",
        "{{ raise_exception('no') }}",
        "{{ namespace(a=1).__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
async def test_bombs_and_escapes_are_a_400_and_the_next_job_works(pool, template):
    started = time.monotonic()
    with pytest.raises(ApiError) as caught:
        await pool.render(job(template, {"messages": [[]]}))
    assert caught.value.status == 400
    assert time.monotonic() - started < 100  # a bound against hanging, not a timing
    assert await pool.render(job("ok", {})) == "ok"


async def test_a_killed_worker_is_replaced_unnoticed(pool):
    await pool.render(job("x", {}))
    (worker,) = pool._idle
    os.kill(worker.pid, signal.SIGKILL)
    assert await pool.render(job("y", {})) == "y"


async def test_a_stopped_worker_is_killed_and_the_job_done_by_another(pool):
    await pool.render(job("x", {}))
    (worker,) = pool._idle
    os.kill(worker.pid, signal.SIGSTOP)
    assert await pool.render(job("y", {})) == "y"
    assert worker.returncode == -signal.SIGKILL


async def test_a_worker_that_waits_for_a_core_is_given_time(pool, monkeypatch):
    """It does what a stopped one does, nothing; its state tells them apart."""
    await pool.render(job("x", {}))
    (worker,) = pool._idle
    os.kill(worker.pid, signal.SIGSTOP)
    asked = []

    def waits_for_core(_):
        asked.append(1)
        if len(asked) == 30:  # longer than both attempts together
            os.kill(worker.pid, signal.SIGCONT)
        return True

    monkeypatch.setattr(worker_pool, "_waits_for_machine", waits_for_core)
    assert await pool.render(job("y", {})) == "y"
    assert pool._idle == [worker], "no other did it"


async def test_a_daemon_that_is_slow_does_not_blame_the_worker(pool):
    """The job reaches the worker in small parts, between other work of the loop."""
    is_done = False

    async def work() -> None:
        while not is_done:
            time.sleep(0.12)  # noqa: ASYNC251 - it holds up the loop
            await asyncio.sleep(0)

    await pool.render(job("x", {}))
    (worker,) = pool._idle
    slow = asyncio.create_task(work())
    try:
        text = await pool.render(job("{{ x }}", {"x": "a" * 1_500_000}))
    finally:
        is_done = True
        await slow
    assert text == "a" * 1_500_000
    assert pool._idle == [worker], "no other did it"


async def test_a_machine_that_is_too_slow_is_called_so(pool, monkeypatch):
    await pool.render(job("x", {}))
    (worker,) = pool._idle
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(worker_pool, "_waits_for_machine", lambda _: True)
    monkeypatch.setattr(worker_pool, "LONGEST_SECONDS", 0.5)
    with pytest.raises(ApiError, match="other programs keep this machine busy") as caught:
        await pool.render(job("y", {}))
    assert (caught.value.status, caught.value.code) == (503, "machine_busy")
    assert not pool._busy
    assert not pool._idle


async def test_workers_are_few_reused_and_gone_after_close(pool):
    assert not pool._idle
    texts = await asyncio.gather(*(pool.render(job(str(i), {})) for i in range(10)))
    assert texts == [str(i) for i in range(10)]
    workers = list(pool._idle)
    assert 1 <= len(workers) <= 2
    await pool.close()
    assert all(worker.returncode is not None for worker in workers)


async def test_a_cancelled_job_leaves_no_busy_worker(pool):
    task = asyncio.create_task(
        pool.render(job("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}))
    )
    await until(lambda: pool._busy or task.done())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not pool._busy
    assert await pool.render(job("ok", {})) == "ok"


async def test_a_worker_that_is_killed_while_its_reader_has_no_room_is_seen_to_end(pool, monkeypatch):
    """asyncio does not see the end of such a pipe by itself."""
    await pool.render(job("x", {}))
    (worker,) = pool._idle
    pipe = worker.stdout._transport
    pause = pipe.pause_reading

    def pause_and_leave() -> None:
        pause()
        task.cancel()

    monkeypatch.setattr(pipe, "pause_reading", pause_and_leave)
    task = asyncio.create_task(pool.render(job("{{ 'a' * 8000000 }}", {})))
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert worker.returncode == -signal.SIGKILL
    assert await pool.render(job("ok", {})) == "ok"


async def test_a_line_of_jobs_ends_somewhere(pool, monkeypatch):
    """One more is refused, and none waits for ever: hostile templates take a second each."""
    monkeypatch.setattr(worker_pool, "MOST_WAITING", 1)
    monkeypatch.setattr(worker_pool, "WAIT_SECONDS", 0.05)
    for _ in range(pool._slots._most):
        await pool._slots.acquire()
    waiting = asyncio.create_task(pool.render(job("x", {})))
    await asyncio.sleep(0)
    for refused in (pool.render(job("y", {})), waiting):
        with pytest.raises(ApiError) as caught:
            await refused
        assert (caught.value.status, caught.value.code) == (503, "workers_busy")
        assert int(caught.value.headers["Retry-After"]) >= 1
    for _ in range(pool._slots._most):
        pool._slots.release("")
    assert await pool.render(job("ok", {})) == "ok"


async def test_slow_templates_of_one_caller_leave_a_worker_to_others(monkeypatch):
    pool, go_on = TemplatePool(), asyncio.Event()

    async def attempt(frame, _seconds):
        if b"slow" in frame:
            await go_on.wait()
        return {"text": "done"}

    async def render(caller, template):
        TENANT.set(caller)
        return await pool.render(job(template, {}))

    monkeypatch.setattr(pool, "_try", attempt)
    async with asyncio.timeout(60):
        slow = [asyncio.create_task(render("greedy", "slow")) for _ in range(9)]
        await asyncio.sleep(0)
        assert await asyncio.create_task(render("other", "quick")) == "done"
        assert not any(task.done() for task in slow)
        go_on.set()
        await asyncio.gather(*slow)


async def test_a_full_line_has_room_for_a_caller_with_less_than_its_share(monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_WAITING", 4)
    pool, go_on = TemplatePool(), asyncio.Event()

    async def attempt(_frame, _seconds):
        await go_on.wait()
        return {"text": "done"}

    async def render(caller):
        TENANT.set(caller)
        return await pool.render(job("x", {}))

    monkeypatch.setattr(pool, "_try", attempt)
    async with asyncio.timeout(60):
        lines = [asyncio.create_task(render(caller)) for caller in ["greedy"] * 6 + ["other"] * 3]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many others"):
            await asyncio.create_task(render("greedy"))
        go_on.set()
        assert await asyncio.gather(*lines) == ["done"] * 9
