"""A model that cannot be loaded, told the same way by `serve`, `up`, `load` and `run`."""

from ..errors import CliError, Exit


def load_error(model: str, cause: str, code: str | None, log_file: str) -> CliError:
    """`code` is the engine's word for it, such as `bad_model`."""
    if code == "does_not_fit":
        fix = "--quant auto, a smaller --ctx or --max-running, or a larger --memory"
        exit_code = Exit.DOES_NOT_FIT
    else:
        fix, exit_code = "mend what is said above, then load it again", Exit.FAILED
    return CliError(f"cannot load {model}", cause, fix, exit_code, log_file)
