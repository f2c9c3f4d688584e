"""Model Context Protocol: llmbox as a server of tools, and as a client of other servers for the chat."""
