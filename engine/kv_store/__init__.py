"""KV cache on disk: files of blocks, their folder, and the threads that read and write them. Torch-free."""
