"""Entry point of the `llmbox` command and of `python -m llmbox`."""

import sys


def main() -> None:
    """Run the command. Ctrl-C during its imports, which `run` cannot catch, ends it without a traceback."""
    try:
        from llmbox.app.cli.root import main as run_command  # noqa: PLC0415 - see above
    except KeyboardInterrupt:
        sys.exit(130)  # `INTERRUPTED` of the module that was not imported
    run_command()


if __name__ == "__main__":
    main()
