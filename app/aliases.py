"""Setting an alias, whoever asks: the command line or the panel."""

from collections.abc import Mapping, Sequence

from .catalog import check_name, resolve
from .errors import CliError, Exit
from .registry import Alias, Registry, parse_parameters


def set_alias(
    registry: Registry, environ: Mapping[str, str], name: str, ref: str, parameters: Sequence[str]
) -> Alias:
    """Let `name` stand for the model `ref`; `parameters` are `k=v`. Raises CliError for what cannot be."""
    names = registry.read()
    check_name(name)
    if ref in names.aliases:
        raise CliError(
            f"{ref} is an alias itself",
            f"it stands for {names.aliases[ref].model}",
            f"llmbox alias set {name} {names.aliases[ref].model}",
            Exit.USAGE,
        )
    if name == "builtin" or name in names.directories:
        raise CliError(f"{name} is a model's name", "an alias would hide it", "choose another", Exit.CONFLICT)
    target = resolve(ref, environ, names)
    alias = Alias(target.name if ref == target.name else target.ref, parse_parameters(list(parameters)))
    registry.set_alias(name, alias)
    return alias
