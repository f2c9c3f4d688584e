import asyncio

from llmbox.app.events import Events


async def test_a_subscriber_sees_what_comes_and_what_it_missed():
    events = Events()
    events.publish("model.ready", {"model": "m"})
    events.publish("request.finished", {"id": "r"})
    stream = events.subscribe(last_event_id=1)
    assert (await anext(stream)).type == "request.finished"
    events.publish("request.started", {})
    assert (await anext(stream)).id == 3
    await stream.aclose()


async def test_without_an_id_only_new_events_come():
    events = Events()
    events.publish("old", {})
    stream = events.subscribe()
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    events.publish("new", {})
    assert (await waiting).type == "new"
    await stream.aclose()


async def test_a_reader_far_behind_is_cut_off(monkeypatch):
    monkeypatch.setattr("llmbox.app.events._BACKLOG", 3)
    events = Events()
    stream = events.subscribe(last_event_id=0)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for _ in range(10):
        events.publish("x", {})
    await waiting
    assert len([event async for event in stream]) == 2
