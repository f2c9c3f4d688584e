"""Context and base of every command: where files are, which settings hold, how to reach the daemon.

Each part is computed when a command first asks for it.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config.paths import Paths, find_paths
from ..errors import CliError, Exit

if TYPE_CHECKING:
    from ..admin_client import Client
    from ..config.entries import Scalar
    from ..config.loader import LoadedSettings
    from ..daemon.compose import DaemonParts
    from ..models.catalog import ModelRef
    from ..models.load_request import ModelRequest
    from ..models.registry import NameLookup, Registry


@dataclass
class Program:
    """Context of a command. `command` starts this same program again; `parts` replaces the daemon's
    components (tests).
    """

    command: list[str] = field(default_factory=lambda: [sys.executable, "-P", "-m", "llmbox"])
    parts: "Callable[[], DaemonParts] | None" = None
    data_dir: Path | None = None
    config: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def paths(self) -> Paths:
        return find_paths(self.data_dir, self.config)

    def settings(self, flags: "Mapping[str, Scalar] | None" = None) -> "LoadedSettings":
        """Load the settings. Raises CliError, also if the file after `--config` does not exist."""
        from ..config.loader import load_settings

        if self.config is not None and not self.paths.config_file.exists():
            raise CliError(
                f"{self.paths.config_file} does not exist",
                "--config or LLMBOX_CONFIG names it",
                "check the path, or create the file: llmbox config edit",
                Exit.USAGE,
            )
        return load_settings(self.paths, self.environ, flags or {})

    @property
    def names(self) -> "NameLookup":
        """Aliases and adopted models, as they are now."""
        return self.registry.read()

    @cached_property
    def registry(self) -> "Registry":
        from ..models.registry import Registry

        return Registry(self.paths.registry_file)

    @cached_property
    def client(self) -> "Client":
        from ..admin_client import Client

        return Client(self.paths)

    def in_memory(self) -> "dict[str, ModelRef]":
        """Return the models that the running daemon has, or had, in memory, by name and alias; empty when
        none runs.
        """
        from ..models.catalog import in_memory

        if not self.client.is_up():
            return {}
        try:
            answer = self.client.get("/admin/api/models")
        except CliError as error:
            if error.exit != Exit.UNREACHABLE:
                raise
            return {}  # it ends, or ended while starting, which is reported elsewhere
        found = {name: in_memory(name, Path(path)) for name, path in answer.get("evicted", {}).items()}
        for row in answer["models"]:
            if row["path"]:
                ref = in_memory(row["name"], Path(row["path"]))
                found |= dict.fromkeys((*row["aliases"], row["name"]), ref)
        return found

    def resolve(self, text: str) -> "ModelRef":
        """Return the model that a user's word names, here or in the running daemon. Raises CliError."""
        from ..models.catalog import resolve

        return resolve(text, self.environ, self.names, self.in_memory())

    def with_projector(self, model: str, projector: str | None) -> str:
        """Return the model folder of a GGUF file with the projector file after --mmproj; `model` itself
        without one. Raises CliError.
        """
        from ..models.gguf_folders import folder_with_projector

        if projector is None:
            return model
        return str(folder_with_projector(Path(model), Path(projector), self.names.gguf_home))

    @property
    def location_flags(self) -> list[str]:
        """Flags that lead another process to the same files."""
        flags = [] if self.data_dir is None else ["--data-dir", str(self.data_dir.absolute())]
        return flags if self.config is None else [*flags, "--config", str(self.config.absolute())]

    def find_models(
        self, models: Sequence[str], alias: str | None, flags: "Mapping[str, Scalar]"
    ) -> "list[ModelRequest]":
        """Return the models to load: the named ones, else those of `server.models`. Raises CliError when one
        is not on disk, or has a name that cannot be served.
        """
        from ..models.catalog import check_name
        from ..models.load_request import ModelRequest, with_draft_path

        options = {name: value for name, value in flags.items() if name.startswith("model.")}
        options = with_draft_path(options, self.resolve)
        texts = models or self.settings(flags).settings.server.models
        require_single(texts, alias)
        found = [ModelRequest(self.resolve(text), alias, options) for text in texts]
        for each in found:
            check_name(each.served_name, f"llmbox adopt {shlex.quote(each.ref.load_ref)} --name NAME")
        return found


def require_single(models: Sequence[str], value: str | None, option: str = "--alias") -> None:
    """Check that an option with a value is given to one model. Raises CliError (exit 2)."""
    if value is not None and len(models) != 1:
        raise CliError(
            f"{option} names one model", f"{len(models)} models are given", "give one MODEL", Exit.USAGE
        )


pass_program = click.make_pass_decorator(Program)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _set_data_dir(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        context.ensure_object(Program).data_dir = value


def _set_config(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        context.ensure_object(Program).config = value


class LocationPath(click.Path):
    """Path that is not empty: `--data-dir "$UNSET"` would keep everything in the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("it is empty.", param, ctx)
        return super().convert(value, param, ctx)


def location_options(*, from_environment: bool = False) -> list[click.Option]:
    """Build the options that say where files are. They are accepted before and after the command's name; the
    environment counts once, before it.
    """
    return [
        click.Option(
            ["--data-dir"],
            envvar="LLMBOX_DATA_DIR" if from_environment else None,
            type=LocationPath(path_type=Path, file_okay=False),
            expose_value=False,
            is_eager=True,
            callback=_set_data_dir,
            metavar="DIR",
            help="Keep all files of llmbox under DIR.",
        ),
        click.Option(
            ["--config"],
            envvar="LLMBOX_CONFIG" if from_environment else None,
            type=LocationPath(path_type=Path, dir_okay=False),
            expose_value=False,
            is_eager=True,
            callback=_set_config,
            metavar="FILE",
            help="Read this file instead of the user's config.toml.",
        ),
    ]


class Command(click.Command):
    """Command that also takes `--data-dir` and `--config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += location_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Refuses NaN: every `FloatRange` accepts it."""
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN, without an import
                raise click.BadParameter("'nan' is not a number.", ctx, param)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the command's own options first, then those with a heading under it."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for option in options:
            if (line := option.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(option, "heading", "Options"), []).append(line)
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl(lines)


PARTS = ("torch", "litestar", "uvicorn", "tokenizers", "huggingface-hub")


def package_versions() -> dict[str, str | None]:
    return {name: _installed(name) for name in PARTS}


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
