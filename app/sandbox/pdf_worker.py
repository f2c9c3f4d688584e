"""PDF worker: reads the text of one PDF, as `python -P -m llmbox.app.sandbox.pdf_worker`.

A hostile file may take long or much memory, so the process lives under limits and the daemon may kill it.

stdin:  the file
stdout: {"pages": int, "read_pages": int, "text": str} or {"error": str}
"""

import io
import json
import os
import resource
import sys
from typing import Any

from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError
from setproctitle import setproctitle

from .worker import limit_process

MEMORY_BYTES = 768 << 20
CPU_SECONDS = 15
MOST_TEXT = 400_000
"""Characters; pages after them are left out."""


def read_text(data: bytes) -> dict[str, Any]:
    try:
        reader = PdfReader(io.BytesIO(data))
        pages = len(reader.pages)
        texts: list[str] = []
        for page in reader.pages:
            texts.append(page.extract_text())
            if sum(map(len, texts)) > MOST_TEXT:
                break
    except (FileNotDecryptedError, DependencyError):
        return {"error": "it is encrypted"}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MB of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a file does wrong is an answer
        return {"error": f"it cannot be read: {(str(error) or type(error).__name__)[:200]}"}
    text = "\n\n".join(texts)[:MOST_TEXT].encode("utf-8", "replace").decode()
    if not text.strip():
        return {"error": "it holds no text; scanned pages are images"}
    return {"pages": pages, "read_pages": len(texts), "text": text}


if __name__ == "__main__":
    setproctitle("llmbox: PDF worker")
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_process(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    stdout.write(json.dumps(read_text(sys.stdin.buffer.read())).encode())
    stdout.flush()
