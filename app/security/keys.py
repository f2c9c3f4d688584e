"""API keys. A secret is shown once and never stored: only its SHA-256 is.

A secret holds 256 random bits, so a plain hash is enough: nobody can try them all, salted or not.
"""

import hashlib
import re
import secrets
import time
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, structs

Scope = Literal["infer", "read", "admin"]
"""Scopes: `infer` uses models, `read` reads metrics, `admin` does everything."""

Tier = Literal["premium", "standard", "background"]
"""Class of a request by its priority."""

PREFIX = "sk-llmbox-"
_SHOWN = len(PREFIX) + 4
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
"""The look-ahead is needed because `$` alone would accept a trailing newline."""

_Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$(?!\n)")]
_Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
_Total = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
_Amount = Annotated[float, Meta(gt=0, le=1e9)]


class KeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permissions and limits of a key, as its creator states them."""

    name: _Name
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=3)] = ("infer",)
    models: Annotated[tuple[_Pattern, ...], Meta(max_length=64)] = ()
    """Names or globs (`qwen*`) of allowed models; empty allows all."""
    expires: Annotated[float, Meta(gt=0, lt=1e11)] | None = None
    """Unix seconds."""
    rpm: _Count | None = None
    """Requests per minute."""
    tpm: _Count | None = None
    """Tokens per minute, of prompts and answers together."""
    requests_day: _Total | None = None
    requests_month: _Total | None = None
    tokens_day: _Total | None = None
    """Tokens of prompts and answers together, in a calendar day of UTC."""
    tokens_month: _Total | None = None
    budget_day: _Amount | None = None
    """Cost by `usage.prices`, in a calendar day of UTC."""
    budget_month: _Amount | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Lower goes first; a request may only rank itself behind it."""
    log_content: bool = False
    """Prompts and answers may be kept."""


class KeyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a key: what is unset stays, None takes a limit away."""

    models: Annotated[tuple[_Pattern, ...], Meta(max_length=64)] | UnsetType = UNSET
    expires: Annotated[float, Meta(gt=0, lt=1e11)] | UnsetType | None = UNSET
    rpm: _Count | UnsetType | None = UNSET
    tpm: _Count | UnsetType | None = UNSET
    requests_day: _Total | UnsetType | None = UNSET
    requests_month: _Total | UnsetType | None = UNSET
    tokens_day: _Total | UnsetType | None = UNSET
    tokens_month: _Total | UnsetType | None = UNSET
    budget_day: _Amount | UnsetType | None = UNSET
    budget_month: _Amount | UnsetType | None = UNSET
    priority: Annotated[int, Meta(ge=-100, le=100)] | UnsetType = UNSET
    log_content: bool | UnsetType = UNSET

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in structs.asdict(self).items() if value is not UNSET}


class ApiKey(KeySpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    """Id of the key. Rotation keeps it."""
    digest: str
    """SHA-256 of the secret, in hex."""
    display: str
    """First characters of the secret."""
    created: float
    rotated: float | None = None

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def allows_model(self, name: str) -> bool:
        return not self.models or any(fnmatchcase(name, pattern) for pattern in self.models)

    def is_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def new_id() -> str:
    return "key_" + secrets.token_hex(8)


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def display_of(secret: str) -> str:
    """First characters of a secret, which may be shown."""
    return secret[:_SHOWN] + "…"


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a key."""
    return re.fullmatch(NAME_PATTERN, text) is not None
