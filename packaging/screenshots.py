"""Renew the picture of the panel in README.md: a daemon under load. `make pictures` draws `llmbox top`.

    make screenshots

Needs the development environment and chromium. The daemon has a data folder and a port of its own.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from panel_pictures import seed
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
QUESTIONS = (
    "What is a KV cache?",
    "What is TTFT?",
    "How do I stop the daemon?",
    "What is continuous batching?",
    "How do I make an API key?",
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmbox-pictures-") as folder:
        seed(Path(folder), time.time())
        command = [sys.executable, "-P", "-m", "llmbox", "--data-dir", folder]
        up = subprocess.run(
            [*command, "up", "builtin", "--port", "0", "--json"], capture_output=True, text=True, check=True
        )
        try:
            started = json.loads(up.stdout)
            over = threading.Event()
            clients = [
                threading.Thread(target=ask, args=(started["url"], question, over)) for question in QUESTIONS
            ]
            for client in clients:
                client.start()
            save_panel(started["sign_in"], IMAGES / "panel.png")
            over.set()
            for client in clients:
                client.join()
        finally:
            subprocess.run([*command, "down", "--now"], check=True)


def ask(url: str, question: str, over: threading.Event) -> None:
    """Send one question again and again, sampled, so that answers differ."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 400, "temperature": 1.2}
    while not over.is_set():
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()


def save_panel(link: str, target: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page: Any = browser.new_page(viewport={"width": 1280, "height": 960})
        page.goto(link)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_timeout(4000)
        page.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    main()
