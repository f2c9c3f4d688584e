"""`python -m llmbox` is the same program as the `llmbox` command."""

from llmbox.app.cli.root import main

if __name__ == "__main__":
    main()
