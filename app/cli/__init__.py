"""The `llmbox` command: one file for each command, imported only when it runs."""
