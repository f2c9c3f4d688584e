"""The last result of `make soak` and `make fuzz`, between two comments of docs/reliability.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reliability.md"


def renew(part: str, text: str) -> None:
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    page = PAGE.read_text("utf-8")
    found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert found.search(page), f"{PAGE} has no part {part!r}"
    PAGE.write_text(found.sub(lambda _: f"{begin}\n{text}\n{end}", page), "utf-8")
