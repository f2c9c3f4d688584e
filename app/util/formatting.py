"""Formatting of sizes, times, progress and suggestions for people: CLI, dashboard and panel."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmbox.engine.ipc.messages import Progress


def printable(text: str) -> str:
    """Escape control characters from data visibly, so that they cannot move the cursor."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


_FOLDERS = re.compile(r"(?<![\w:/.])(?:/[^\s/:,;'\"()]+)+/(?=[^\s/])")


def hide_folders(text: str, folder: object = None) -> str:
    """Return text for callers who may not see this box's paths: absolute paths keep their last name, those
    below `folder` what follows it.
    """
    known = text if folder is None else text.replace(f"{folder}/", "")
    return _FOLDERS.sub("", known)


def size(count: float | None, *, short: bool = False) -> str:
    """Format bytes in powers of 1000. `short` shows decimals from GB on only."""
    if count is None:
        return "-"
    for limit, unit, digits in ((1e12, "TB", 2), (1e9, "GB", 1), (1e6, "MB", 1), (1e3, "kB", 1)):
        if count >= limit:
            return f"{count / limit:.{0 if short and limit < 1e9 else digits}f} {unit}"
    return f"{count:.0f} B"


def span(seconds: float | None, *, padded: bool = False) -> str:
    """Format a duration. `padded`: minutes and seconds beside a larger unit have two digits."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else whole_span(seconds, padded=padded)


def whole_span(seconds: float, *, padded: bool = False) -> str:
    """Format a duration in whole seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    digits = "02d" if padded else "d"
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:{digits}} min"
    return f"{minutes} min {rest:{digits}} s" if minutes else f"{rest} s"


def rfc3339(unix: float) -> str:
    """Format a Unix time in UTC."""
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")


def clock(unix: float) -> str:
    """Format a Unix time as local time."""
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Nearest name, ignoring case; None if nothing is similar."""
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME? `, or an empty string."""
    found = nearest(word, names)
    return f"did you mean {found}? " if found else ""


STARTING = "starting its engine"
ENGINE_READY = "reading its tokenizer"


def format_load_progress(progress: "Progress") -> str:
    """Format the progress of a load: kernels being compiled, or weights being read."""
    if progress.phase == "kernels":
        return format_compile_progress(progress.done, progress.total)
    return f"reading weights: {progress.done / progress.total:.0%}" if progress.total else "reading weights"


def format_compile_progress(done: int, total: int) -> str:
    """Format the progress of compiling. The steps run in parallel, so none is named."""
    if not total:
        return "waiting for the CPU kernels, which another process compiles"
    return f"compiling the CPU kernels (once): {done} of {total} steps"


def rate_range(low: float, high: float) -> str:
    """Format a range of tokens a second, without its unit."""
    digits = 1 if high < 20 else 0
    return f"{low:.{digits}f} to {high:.{digits}f}"


def format_setting(value: object) -> str:
    """Format a setting's value as the command line takes it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def experts_whole(is_parallel: object, copies: object) -> str:
    """Format the experts of a rank as a part of a list; empty where they are not whole."""
    return f", experts whole{f' + {copies} copies' if copies else ''}" if is_parallel else ""


def runs_on(info: Mapping[str, Any]) -> str:
    """Format device, weight format and ranks of a loaded model (`ModelInfo` as a mapping)."""
    weights = info["dtype"] if info["quant"] == "none" else info["quant"]
    ranks = info["tp"] * info["pp"]
    if pair := info.get("disaggregate"):
        return f"{info['device']} {weights} on cores {pair[0]}:{pair[1]}"
    if info.get("expert_bytes"):
        experts = info["dtype"] if info["expert_quant"] == "none" else info["expert_quant"]
        return f"{info['device']} {weights}, experts on cpu {experts}"
    whole = experts_whole(info.get("expert_parallel"), info.get("redundant_experts"))
    return f"{info['device']} {weights}" + (
        f" on {ranks} ranks (tp {info['tp']}, pp {info['pp']}{whole})" if ranks > 1 else ""
    )


def no_kv_cache(*, has_state: bool) -> str:
    """Return why a model has no KV cache, for people."""
    return f"none: {'states of one size for any context' if has_state else 'each text is computed at once'}"
