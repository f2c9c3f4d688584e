"""Errors between the daemon and a hub, in words that name the next step."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message

from ..errors import Exit, LlmboxError

Headers = Mapping[str, str] | Message
"""Headers with case-insensitive keys."""

EXIT_OF_CODE = {
    "hub_unreachable": Exit.NETWORK,
    "hub_offline": Exit.NETWORK,
    "hub_busy": Exit.NETWORK,
    "hub_error": Exit.NETWORK,
    "repo_not_found": Exit.NOT_FOUND,
    "no_weights": Exit.NOT_FOUND,
    "repo_gated": Exit.DENIED,
    "bad_token": Exit.DENIED,
    "integrity": Exit.INTEGRITY,
    "disk_full": Exit.DOES_NOT_FIT,
    "does_not_fit": Exit.DOES_NOT_FIT,
    "unsupported_model": Exit.DOES_NOT_FIT,
    "model_busy": Exit.CONFLICT,
}


@dataclass(slots=True)
class HubError(LlmboxError):
    """Failure of a request to the hub. `code` is one of EXIT_OF_CODE; `retry` means that the same request may
    succeed a little later.
    """

    code: str
    what: str
    why: str = ""
    fix: str = ""
    retry: bool = False
    retry_after: float | None = None
    """Seconds that the server asks us to wait."""
    is_definite: bool = False
    """The network or the name is wrong: who has not begun need not try again."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what

    @property
    def exit(self) -> Exit:
        return EXIT_OF_CODE.get(self.code, Exit.FAILED)


def of_status(status: int, headers: Headers | None, what: str, token: str | None) -> HubError:
    """Build the error of a 4xx or 5xx answer. `what` names the model."""
    code = (headers.get("X-Error-Code") or "") if headers is not None else ""
    if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
        return gated(what, token)
    if status == 401 and token is not None and code != "RepoNotFound":
        return HubError(
            "bad_token",
            f"the hub refuses the token for {what}",
            "HTTP 401: it is invalid or expired",
            "create a new one on the hub and set HF_TOKEN, then restart the daemon: llmbox restart",
        )
    if status in {401, 404}:
        return not_found(what, token)
    if status == 429:
        return HubError(
            "hub_busy",
            f"the hub limits requests for {what}",
            "HTTP 429: too many requests",
            "try again later; with HF_TOKEN set the limits are higher",
            retry=True,
            retry_after=_seconds(headers),
        )
    retry = status >= 500 or status == 408
    return HubError(
        "hub_error",
        f"the hub failed on {what}",
        f"HTTP {status}",
        "try again later",
        retry=retry,
        retry_after=_seconds(headers),
    )


def gated(what: str, token: str | None) -> HubError:
    fix = (
        "accept its terms on the model's page with the account of your token"
        if token
        else "accept its terms on the model's page, then set HF_TOKEN and restart the daemon: llmbox restart"
    )
    return HubError("repo_gated", f"{what} is gated", "its authors admit only approved accounts", fix)


def not_found(what: str, token: str | None) -> HubError:
    why = "the hub knows no such model or revision" + (
        ", or your token may not see it" if token else ", or it is private and HF_TOKEN is not set"
    )
    return HubError("repo_not_found", f"{what} was not found", why, "search for it: llmbox search TEXT")


def unreachable(endpoint: str, error: object, *, is_definite: bool = False) -> HubError:
    return HubError(
        "hub_unreachable",
        f"{endpoint} cannot be reached",
        str(error) or type(error).__name__,
        "check the network, HF_ENDPOINT and HTTPS_PROXY, then try again; a download resumes where it stopped",
        retry=True,
        is_definite=is_definite,
    )


def offline() -> HubError:
    return HubError(
        "hub_offline",
        "access to the hub is switched off",
        "HF_HUB_OFFLINE is set",
        "unset it and restart the daemon: llmbox restart",
    )


def of_os_error(error: OSError, place: object, need: int | None = None, have: int | None = None) -> HubError:
    """Build the error of a failed write."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(place, need, have)
    return HubError(
        "write_failed", f"cannot write to {place}", error.strerror or str(error), "check its owner and mode"
    )


def disk_full(place: object, need: int | None, have: int | None) -> HubError:
    from llmbox.engine.planning.estimator import show_bytes  # noqa: PLC0415 - machine facts come with it

    why = (
        f"needs {show_bytes(need, up=True)} more and has {show_bytes(have)} free"
        if need is not None and have is not None
        else "no space left"
    )
    return HubError(
        "disk_full",
        f"the disk of {place} is too full",
        why,
        "free some space (llmbox df, llmbox rm MODEL) or move the cache with HF_HOME, then pull again",
    )


def _seconds(headers: Headers | None) -> float | None:
    text = headers.get("Retry-After", "") if headers is not None else ""
    return min(float(text), 300.0) if text.isdecimal() else None


class DownloadStopped(Exception):  # noqa: N818 - nothing failed
    """The download was asked to stop."""
