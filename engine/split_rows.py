"""A tensor of a checkpoint that stacks several linears, as one tensor for each. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from .errors import ModelError
from .safetensors_header import TensorEntry, shown


def split_rows(entry: TensorEntry, parts: Mapping[str, int]) -> dict[str, TensorEntry]:
    """{name: rows of the linear} -> the same names. Scales of blocks are cut between blocks; one number for
    all of the tensor is the same for each part. Raises ModelError.
    """
    if entry.shape in ((), (1,), (1, 1)):
        return dict.fromkeys(parts, entry)
    total, rows = sum(parts.values()), entry.shape[0]
    found, first = {}, 0
    for name, size in parts.items():
        have, rest = divmod(size * rows, total)
        if rest:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} of shape {list(entry.shape)} cannot be cut into "
                f"parts of {', '.join(map(str, parts.values()))} rows, as config.json has them"
            )
        nbytes = entry.nbytes // rows
        shape = (have, *entry.shape[1:])
        found[name] = replace(entry, shape=shape, offset=entry.offset + first * nbytes, nbytes=have * nbytes)
        first += have
    return found
