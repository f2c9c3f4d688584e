"""Engine errors that a user can cause.

EngineError
├── ModelError          the model directory cannot be served (names the file)
│   └── UnsupportedArchitecture
├── DoesNotFit          weights, context or one request exceed the memory budget (need/have)
├── InvalidRequest      a request holds a value that the engine cannot compute with
├── GrammarError        a grammar cannot be compiled or followed
├── DeviceError         the requested device or dtype is not available
├── ParallelError       the model or the machine does not support the requested tp and pp
└── RankLost            a worker process ended
"""


class EngineError(Exception):
    """Base class. `code` crosses the process boundary and appears in API errors."""

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
    """Worker process ended: its end of the socket is closed."""

    code = "rank_lost"
