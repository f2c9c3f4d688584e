"""Errors of the engine that a user can cause.

EngineError
├── ModelError          the model directory cannot be served (names the file)
│   └── UnsupportedArchitecture
├── DoesNotFit          weights, context or one request exceed the memory budget (need/have)
├── InvalidRequest      a request holds what cannot be computed with
├── GrammarError        what an answer must follow cannot be followed
├── DeviceError         the asked device or dtype is not there
└── ParallelError       the model or the machine cannot be cut as asked
"""


class EngineError(Exception):
    """Base. `code` is the word that crosses the process boundary and reaches API errors."""

    code = "engine_error"


class ModelError(EngineError):
    code = "bad_model"


class UnsupportedArchitecture(ModelError):  # noqa: N818 - named for what the user reads
    code = "unsupported_architecture"


class DoesNotFit(EngineError):  # noqa: N818
    code = "does_not_fit"


class InvalidRequest(EngineError):  # noqa: N818
    code = "invalid_request"


class GrammarError(EngineError):
    code = "grammar_error"


class DeviceError(EngineError):
    code = "device_unavailable"


class ParallelError(EngineError):
    code = "cannot_split"


class RankLost(EngineError):  # noqa: N818 - named for what happened
    """A worker is gone: its end of the socket is closed."""

    code = "rank_lost"
