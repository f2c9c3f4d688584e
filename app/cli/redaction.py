"""What must not leave the box, by name and by pattern, taken out of data that a user gives away."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

GONE = "[removed]"

_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(api[_-]?key|secrets?|passw(or)?d|tokens?|authorization|cookie|credentials?|digest)($|[_.-])"
)
_TEXT_NAME = re.compile(r"(?i)^(prompt|messages?_text|content|output|answer|rendered|system|body)$")
"""Fields that hold what somebody asked or was answered."""
_COUNT = (int, float, bool)
"""`prompt_tokens: 12` and `system: 3` are numbers about texts, not texts."""

_PATTERNS = (
    re.compile(r"sk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)([?&](?:token|key|signature|x-amz-[a-z-]+)=)[^&\s\"']+"),
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"),
    re.compile(r"(?i)\b(HF_TOKEN|[A-Z0-9_]*(?:API_KEY|SECRET|PASSWORD))=\S+"),
)


def redact_text(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(GONE, text)
    return text


def redact(value: Any, name: str = "") -> Any:
    """A copy of plain data without secrets and without the texts of requests."""
    if isinstance(value, Mapping):
        return {redact_text(str(key)): redact(each, str(key)) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        hidden = bool(value) and _hides(name) and not all(isinstance(each, _COUNT) for each in value)
        return GONE if hidden else [redact(each) for each in value]
    if value is None or isinstance(value, _COUNT):
        return value
    return GONE if _hides(name) and value else redact_text(str(value))


def _hides(name: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _TEXT_NAME.match(name))
