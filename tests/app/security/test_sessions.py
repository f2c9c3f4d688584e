"""Sessions, one-time tokens and the back-off, by a clock that the test turns."""

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.security.security import (
    ABSOLUTE,
    GRACE,
    IDLE,
    MOST_SESSIONS,
    ROTATE,
    TOKEN_LIFE,
    OneTimeTokens,
    Sessions,
    SignInBackoff,
    is_csrf_token,
)
from support.clock import Clock


def test_a_session_ends_when_idle() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    session, secret = sessions.open()
    clock.now += IDLE - 1
    assert sessions.find(secret) is session
    clock.now += IDLE - 1
    assert sessions.find(secret) is session
    clock.now += IDLE
    assert sessions.find(secret) is None
    assert session.closed


def test_a_session_ends_in_any_case() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    session, secret = sessions.open()
    for _ in range(int(ABSOLUTE / IDLE * 2)):
        clock.now += IDLE / 2
        found = sessions.find(secret)
        assert found is (session if clock.now - session.opened < ABSOLUTE else None)
    assert not sessions.is_alive(session)


def test_the_secret_changes_and_the_old_one_counts_for_a_moment() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    session, first = sessions.open()
    assert sessions.rotate(session) is None
    clock.now += ROTATE
    second = sessions.rotate(session)
    assert second is not None
    assert second != first
    assert sessions.rotate(session) is None
    assert sessions.find(first) is session
    clock.now += GRACE + 1
    assert sessions.find(first) is None
    assert sessions.find(second) is session
    clock.now += ROTATE
    third = sessions.rotate(session)
    assert third is not None
    sessions.close(session)
    assert [sessions.find(secret) for secret in (first, second, third)] == [None] * 3
    assert sessions.rotate(session) is None


def test_closing_ends_it_everywhere_and_others_stay() -> None:
    sessions = Sessions(Clock())
    one, secret = sessions.open()
    other, other_secret = sessions.open()
    sessions.close(one)
    assert sessions.find(secret) is None
    assert sessions.find(other_secret) is other


def test_sessions_are_bounded() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    secrets = []
    for _ in range(MOST_SESSIONS + 10):
        clock.now += 1
        secrets.append(sessions.open()[1])
    assert sum(sessions.find(secret) is not None for secret in secrets) == MOST_SESSIONS
    assert sessions.find(secrets[0]) is None


def test_no_secret_is_kept() -> None:
    sessions = Sessions(Clock())
    _, secret = sessions.open()
    assert secret not in repr(vars(sessions))


def test_the_csrf_token_belongs_to_its_session() -> None:
    sessions = Sessions(Clock())
    one, other = sessions.open()[0], sessions.open()[0]
    assert is_csrf_token(one, one.csrf_token)
    assert not is_csrf_token(one, other.csrf_token)
    assert not is_csrf_token(one, "")
    assert not is_csrf_token(one, "\udc80é")


@pytest.mark.parametrize("secret", ["", "x", "\udc80", "é" * 5000])
def test_strange_secrets_find_nothing(secret: str) -> None:
    assert Sessions(Clock()).find(secret) is None
    assert not OneTimeTokens(Clock()).use(secret)


def test_a_token_opens_once_within_15_minutes() -> None:
    clock = Clock()
    tokens = OneTimeTokens(clock)
    one, late = tokens.make(), tokens.make()
    assert tokens.use(one)
    assert not tokens.use(one)
    clock.now += TOKEN_LIFE
    assert not tokens.use(late)


def test_tokens_are_bounded() -> None:
    tokens = OneTimeTokens(Clock())
    made = [tokens.make() for _ in range(100)]
    assert sum(map(tokens.use, made)) == 64


def test_five_failures_are_free_then_each_doubles_the_wait() -> None:
    clock = Clock()
    back_off = SignInBackoff(clock)
    for _ in range(5):
        back_off.check("a")
        back_off.record_failure("a")
    waits = []
    for _ in range(9):
        with pytest.raises(ApiError) as caught:
            back_off.check("a")
        assert (caught.value.status, caught.value.code) == (429, "too_many_attempts")
        waits.append(int(caught.value.headers["Retry-After"]))
        back_off.check("b")
        clock.now += waits[-1]
        back_off.check("a")
        back_off.record_failure("a")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    back_off.record_success("a")
    back_off.check("a")


def test_addresses_are_bounded() -> None:
    back_off = SignInBackoff(Clock())
    for i in range(10_000):
        back_off.record_failure(str(i))
    assert len(back_off._failures) <= 4096
