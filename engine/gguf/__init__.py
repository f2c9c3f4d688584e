"""Import of GGUF files (llama.cpp, Ollama, LM Studio): conversion to a safetensors checkpoint."""
