"""An open stream does not outlive the right to read it."""

from pathlib import Path

from llmbox.app.events import Events
from llmbox.app.http.admin.telemetry import _frames
from llmbox.app.security.keys import KeySpec
from support.http_app import security_in


async def test_a_stream_ends_with_its_session_or_key(tmp_path: Path) -> None:
    security = security_in(tmp_path)
    _, key_secret = security.keys.add(KeySpec(name="admin", scopes=("admin",)))
    session, cookie = security.sessions.open()
    by_key, by_session = security.by_key(key_secret), security.by_session(cookie)
    assert by_key is not None
    assert by_session is not None
    for identity, end in (
        (by_session, lambda: security.sessions.close(session)),
        (by_key, lambda: security.revoke("admin")),
    ):
        events = Events()
        events.publish("first", {})
        events.publish("second", {})
        stream = _frames(events, 0, lambda identity=identity: security.is_valid(identity))  # type: ignore[misc]
        assert b"first" in await anext(stream)
        end()
        assert [frame async for frame in stream] == []
        assert events.subscribers == 0
