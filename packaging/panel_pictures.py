"""Draw pictures of every page of the panel: light and dark, on a desktop, a wide screen and a phone.

    make pictures            all pages into build/pictures
    make pictures ARGS="--pages overview keys --themes dark --widths 390"
    make screenshots         the picture in README.md: the overview of a daemon under load

Needs the development environment and chromium. The daemon has a data folder and a port of its own, and a
week of made-up requests in its log, so that pages look as they do on a box in use.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from llmbox.app.lifecycle.program import Program
from llmbox.app.security.key_store import KeyStore, LastUsed
from llmbox.app.security.keys import KeySpec, QuotaLedger
from llmbox.app.store.queries import requests as request_queries
from llmbox.app.store.record import RequestRecord
from llmbox.app.telemetry.history import KEEP

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "build" / "pictures"
README_PICTURE = ROOT / "docs" / "images" / "panel.png"
QUESTIONS = (
    "What is a KV cache?",
    "What is TTFT?",
    "How do I stop the daemon?",
    "What is continuous batching?",
    "How do I make an API key?",
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAGES = {
    "overview": "/admin",
    "models": "/admin/models",
    "discover": "/admin/models/discover",
    "downloads": "/admin/models/activity",
    "adapters": "/admin/models/adapters",
    "model": "/admin/models/show?ref=builtin",
    "requests": "/admin/requests",
    "failed-requests": "/admin/requests?status=errors",
    "playground": "/admin/playground",
    "telemetry": "/admin/telemetry?range=86400",
    "memory": "/admin/memory",
    "keys": "/admin/keys",
    "settings": "/admin/settings",
    "system": "/admin/system",
    "first-run": "/admin/first-run",
}
CALLERS = (("web-shop", 5), ("alice-laptop", 3), ("nightly-batch", 2), ("", 1), ("(panel)", 1))
ERRORS = (
    (429, "rate_limit_exceeded", 8),
    (400, "context_length_exceeded", 5),
    (429, "queue_full", 3),
    (503, "engine_crashed", 1),
    (499, "client_disconnected", 4),
)
DAY = 86400


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of every page of the panel.")
    parser.add_argument("--readme", action="store_true", help="draw the picture in README.md alone")
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--pages", nargs="*", choices=PAGES, default=list(PAGES))
    parser.add_argument("--themes", nargs="*", choices=("light", "dark"), default=["light", "dark"])
    parser.add_argument("--widths", nargs="*", type=int, default=[390, 1280, 2560])
    chosen = parser.parse_args()
    chosen.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmbox-pictures-") as folder:
        seed(Path(folder), time.time())
        command = [sys.executable, "-P", "-m", "llmbox", "--data-dir", folder]
        try:
            up = subprocess.run(
                [*command, "up", "builtin", "--port", "0", "--json"],
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            )
            started = json.loads(up.stdout)
            over = threading.Event()
            clients = [
                threading.Thread(target=ask, args=(started["url"], question, over), daemon=True)
                for question in (QUESTIONS if chosen.readme else QUESTIONS[:1])
            ]
            for client in clients:
                client.start()
            draw(started["sign_in"], chosen)
            over.set()
            for client in clients:
                client.join(60)
        finally:
            subprocess.run([*command, "down", "--now"], check=True, timeout=60)


def ask(url: str, question: str, over: threading.Event) -> None:
    """Keep one long answer in flight."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 900}
    while not over.is_set():
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps(body | {"ignore_eos": True, "temperature": 1.0}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=120).read()


def seed(folder: Path, now: float) -> None:
    """Write keys and a week of requests, telemetry and annotations, from one seed."""
    from llmbox.app.store.database import open_database  # noqa: PLC0415 - SQLAlchemy is slow to import

    paths = Program(data_dir=folder).paths
    paths.create()
    paths.config_file.parent.mkdir(parents=True, exist_ok=True)
    paths.config_file.write_text(
        '[usage]\nprices = ["builtin=0.10/0.40"]\ntargets = ["builtin=800/25"]\n', encoding="utf-8"
    )
    draw_number = random.Random(7)
    keys = KeyStore(paths.keys_file)
    shop, _ = keys.add(KeySpec(name="web-shop", rpm=600, tokens_day=200_000, budget_month=1.0, priority=-10))
    alice, _ = keys.add(KeySpec(name="alice-laptop", models=("builtin",), log_content=True))
    keys.add(KeySpec(name="nightly-batch", priority=50, requests_day=100, expires=now + 20 * DAY))
    ledger, used = QuotaLedger(paths.keys_quota_file), LastUsed(paths.keys_used_file)
    ledger.of(shop.id).add(161_400, 0.31)
    used.note(shop.id)
    used.note(alice.id)
    ledger.close()
    used.close()
    database = open_database(paths.request_db)
    moments = sorted(now - 60 - draw_number.random() ** 2 * 7 * DAY for _ in range(1500))
    request_queries.add(
        database, [(make_record(draw_number, at, i), None, ()) for i, at in enumerate(moments)]
    )
    for step in (10, 60):
        begin = int(now) // step * step - min(KEEP[step], 7 * DAY)
        rows = [
            (step, at, json.dumps(make_point(draw_number, at, now))) for at in range(begin, int(now), step)
        ]
        request_queries.add_telemetry(database, rows, KEEP, int(now))
    for hours, kind, text in (
        (20, "load", "ready"),
        (11, "restart", "the engine process ended with signal 9"),
        (10.9, "load", "ready"),
        (3, "refusal", "14 requests refused: queue_full"),
    ):
        request_queries.add_annotation(database, now - hours * 3600, kind, "builtin", text, 0)
    database.dispose()


def make_record(draw_number: random.Random, at: float, number: int) -> RequestRecord:
    names, weights = zip(*CALLERS, strict=True)
    key = draw_number.choices(names, weights)[0]
    values: dict[str, Any] = {
        "id": f"chatcmpl-{number:05d}{draw_number.getrandbits(64):016x}",
        "created": at,
        "model": "builtin",
        "endpoint": draw_number.choice(["/v1/chat/completions", "/v1/messages", "/api/chat"]),
        "key": key,
        "stream": draw_number.random() < 0.7,
        "tier": "standard",
        "client": "127.0.0.1",
    }
    if draw_number.random() < 0.06:
        status, code, _ = draw_number.choices(ERRORS, [each[2] for each in ERRORS])[0]
        return RequestRecord(**values, http_status=status, error_code=code)
    prompt, output = int(draw_number.lognormvariate(6, 0.9)), int(draw_number.lognormvariate(4.6, 0.8))
    ttft, tpot = draw_number.lognormvariate(-2, 0.6), draw_number.lognormvariate(-4, 0.2)
    return RequestRecord(
        **values,
        http_status=200,
        finish_reasons="length" if output > 250 else "stop",
        prompt_tokens=prompt,
        cached_tokens=prompt // 2 if draw_number.random() < 0.5 else 0,
        looked_up_tokens=prompt,
        output_tokens=output,
        queue_s=ttft / 5,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=ttft + tpot * output,
        params='{"temperature":0.7,"max_tokens":512}',
    )


def make_point(draw_number: random.Random, at: int, now: float) -> dict[str, float]:
    busy = max(0.05, math.sin(at / DAY * 2 * math.pi) * 0.4 + 0.5 + draw_number.gauss(0, 0.06))
    failing = 0.08 if 10.9 * 3600 < now - at < 11.2 * 3600 else 0.0
    return {
        "tokens_out": 220 * busy,
        "tokens_in": 900 * busy * draw_number.uniform(0.7, 1.3),
        "running": round(6 * busy, 2),
        "waiting": max(0.0, round(4 * busy - 2.5, 2)),
        "open_requests": round(6 * busy, 2),
        "ttft_p50": 0.12 + 0.1 * busy,
        "ttft_p95": 0.3 + 0.9 * busy**3,
        "tpot_p50": 0.016 + 0.006 * busy,
        "tpot_p95": 0.02 + 0.02 * busy,
        "kv_used": min(0.97, 0.8 * busy),
        "prefix_hit": min(0.95, 0.45 + draw_number.gauss(0, 0.05)),
        "error_rate": failing,
        "cpu": min(1.0, busy),
        "memory_available": 15e9 - 4e9 * busy,
        "disk_free": 120e9,
    }


def draw(link: str, chosen: argparse.Namespace) -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - seeding needs no browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        context: Any = browser.new_context()
        page = context.new_page()
        page.goto(link)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Overview").wait_for()
        if chosen.readme:
            page.set_viewport_size({"width": 1280, "height": 960})
            page.wait_for_timeout(45_000)  # rates of the load, and their trends
            page.screenshot(path=README_PICTURE)
            return
        home = page.url.partition("/admin")[0]
        for width in chosen.widths:
            page.set_viewport_size({"width": width, "height": 844 if width < 600 else width * 9 // 16})
            for theme in chosen.themes:
                page.emulate_media(color_scheme=theme)
                for name in chosen.pages:
                    page.goto(home + PAGES[name])
                    page.wait_for_timeout(1500)  # fragments and charts
                    page.screenshot(path=chosen.to / f"{name}-{width}-{theme}.png", full_page=True)


if __name__ == "__main__":
    main()
