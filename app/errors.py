"""Exception family for everything that a user or a client can cause.

LlmboxError            what failed, why, what to do next
├── ApiError           ends as an OpenAI error object
└── CliError           ends as four lines on stderr and an exit code
"""

from dataclasses import dataclass, field
from enum import IntEnum


class LlmboxError(Exception):
    """Base of all expected errors."""


@dataclass(slots=True, eq=False)
class ApiError(LlmboxError):
    """HTTP answer of 4xx or 5xx in OpenAI's shape. `code` is a word; `message` never names internals."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def __str__(self) -> str:
        return self.message


def missing_parameter(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", "missing_required_parameter", param)


def unsupported_parameter(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, "unsupported_parameter", param)


def unsupported_content(param: str, message: str) -> ApiError:
    return ApiError(400, message, "unsupported_content", param)


def unavailable(message: str, code: str, *, retry_after: int) -> ApiError:
    """Build the 503 error of what may succeed in `retry_after` seconds."""
    return ApiError(503, message, code, None, "server_error", {"Retry-After": str(retry_after)})


class Exit(IntEnum):
    """Exit codes of the command line, a promise to scripts."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    DOES_NOT_FIT = 5
    DENIED = 6
    NETWORK = 7
    INTEGRITY = 8
    CONFLICT = 9
    DOCTOR = 10


@dataclass(slots=True)
class CliError(LlmboxError):
    """Error of a command: what failed, why (with numbers), what to run next, where the log is."""

    what: str
    why: str = ""
    fix: str = ""
    exit: Exit = Exit.FAILED
    log: str = ""

    def __str__(self) -> str:
        return self.what


def load_error(model: str, cause: str, code: str | None, log_file: str) -> CliError:
    """Make the error of a failed load. `code` is the engine's error code, such as `bad_model`."""
    if code == "does_not_fit":
        fix = "--quant auto, a smaller --ctx or --max-running, or a larger --memory"
        exit_code = Exit.DOES_NOT_FIT
    elif code == "engine_error":  # of ours, or a process that ended: only the log says more
        fix, exit_code = "llmbox logs says more; then load it again", Exit.FAILED
    else:
        fix, exit_code = "fix the problem above, then load it again", Exit.FAILED
    return CliError(f"cannot load {model}", cause, fix, exit_code, log_file)
