"""Progress of a load as text, for `up`, `load`, `/ready`, the panel and `llmbox top`."""

from llmbox.engine.ipc.messages import Progress

STARTING = "starting its engine"
ENGINE_READY = "reading its tokenizer"


def format_load_progress(progress: Progress) -> str:
    """Format the progress of a load: kernels being compiled, or weights being read."""
    if progress.phase == "kernels":
        return format_compile_progress(progress.done, progress.total)
    return f"reading weights: {progress.done / progress.total:.0%}" if progress.total else "reading weights"


def format_compile_progress(done: int, total: int) -> str:
    """Format the progress of compiling. The steps run in parallel, so none is named."""
    if not total:
        return "waiting for the CPU kernels, which another process compiles"
    return f"compiling the CPU kernels (once): {done} of {total} steps"
