"""A request's id at the API, and the ids of its sequences in the engine: one a choice, never used twice."""


def sequence_id(request_id: str, number: int) -> str:
    return f"{request_id}.{number}"


def request_of(sequence: str) -> str:
    """The request that it belongs to."""
    return sequence.rpartition(".")[0] or sequence
