"""Picture as a request has it, and as a file on this machine that a command sends."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmbox.engine.checkpoint.files import read_regular

from ..errors import CliError, Exit

FILE_BYTES: Final = 24 << 20
"""Largest file that a command reads: in base64 it is the longest body that a daemon takes by default."""
_SIGNS: Final = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))
_PATH: Final = re.compile(
    r"""'(?P<quoted>(?:~|\.{0,2})/[^'\n]+)'"""
    r'''|"(?P<double>(?:~|\.{0,2})/[^"\n]+)"'''
    r"""|(?<!\S)(?P<plain>(?:~|\.{0,2})/(?:\\.|[^\s\\'"])+)"""
)
"""Path in a prompt: quoted, or with its blanks escaped, as terminals write a file that is dropped on them."""
_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@dataclass(frozen=True, slots=True)
class ImageSource:
    url: str
    """`data:` URL with base64, or a URL to fetch."""
    low_detail: bool
    param: str
    """Place in the request, for errors."""


def read_image_url(text: str) -> str:
    """Return a picture's file as a `data:` URL. Raises CliError."""
    try:
        data = read_regular(Path(text).expanduser(), FILE_BYTES)
    except FileNotFoundError:
        raise CliError(f"no file {text}", "it does not exist", "name a picture", Exit.NOT_FOUND) from None
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CliError(f"{text} cannot be read", why, "name a picture that you can read") from None
    kind = next((kind for sign, kind in _SIGNS if data.startswith(sign)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if not kind:
        raise CliError(
            f"{text} is no picture that can be sent",
            "it is no PNG, JPEG, WebP or GIF",
            "convert it to one of these",
        )
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def split_image_paths(text: str) -> tuple[str, list[str]]:
    """Return a prompt without the paths of pictures in it that exist, and these paths."""
    found = []

    def cut(match: re.Match[str]) -> str:
        plain = match["plain"] or ""
        bare = plain.rstrip(".,;:?!)")
        path = match["quoted"] or match["double"] or re.sub(r"\\(.)", r"\1", bare)
        try:
            is_picture = path.lower().endswith(_SUFFIXES) and Path(path).expanduser().is_file()
        except (OSError, RuntimeError):
            is_picture = False
        if not is_picture:
            return match[0]
        found.append(path)
        return plain[len(bare) :]

    left = _PATH.sub(cut, text)
    return (" ".join(left.split()) if found else text), found
