"""Creation of aliases, for the command line and the panel."""

from collections.abc import Mapping, Sequence

from ..errors import CliError, Exit
from .catalog import ModelRef, check_name, resolve
from .registry import Alias, Registry, parse_parameters


def set_alias(
    registry: Registry,
    environ: Mapping[str, str],
    name: str,
    ref: str,
    parameters: Sequence[str],
    memory: Mapping[str, ModelRef] | None = None,
) -> Alias:
    """Create or replace the alias `name` of the model `ref`.

    `parameters` are `k=v`, `memory` is as for `resolve`. Raises CliError for invalid names or values.
    """
    names = registry.read()
    check_name(name)
    if ref in names.aliases:
        raise CliError(
            f"{ref} is an alias itself",
            f"it stands for {names.aliases[ref].model}",
            f"llmbox alias set {name} {names.aliases[ref].model}",
            Exit.USAGE,
        )
    target = resolve(ref, environ, names, memory)
    if name in names.aliases and names.aliases[name].adapter:
        raise CliError(f"{name} is an adapter", "an alias would replace it", "choose another", Exit.CONFLICT)
    holder = (memory or {}).get(name)
    if name == "builtin" or name in names.directories or (holder is not None and holder.path != target.path):
        raise CliError(f"{name} is a model's name", "an alias would hide it", "choose another", Exit.CONFLICT)
    # The name of a directory that was not adopted is forgotten when it is unloaded.
    known = target.name if target.name in names.directories else target.ref
    alias = Alias(known, parse_parameters(list(parameters)))
    registry.set_alias(name, alias)
    return alias
