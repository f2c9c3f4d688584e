"""Picture as a request has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSource:
    url: str
    """`data:` URL with base64, or a URL to fetch."""
    low_detail: bool
    param: str
    """Place in the request, for errors."""
