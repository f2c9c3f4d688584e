"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: read once, to make a checkpoint of them."""
