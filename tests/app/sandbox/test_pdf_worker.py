"""Texts of PDFs: read in a process that ends when it takes too long, and leaves nothing behind."""

import asyncio

import pytest

from llmbox.app.sandbox import pdf_worker, pool
from support.pdf_files import pdf

pytestmark = pytest.mark.process


async def test_a_file_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(pool, "PDF_SECONDS", 0.0)
    async with asyncio.timeout(60):
        assert await pool.read_pdf(pdf("text")) == {"error": "it takes too much computing"}


def test_long_texts_are_cut_after_the_page_that_passes_the_limit(monkeypatch):
    monkeypatch.setattr(pdf_worker, "MOST_TEXT", 12)
    read = pdf_worker.read_text(pdf("Mombasa", "Nairobi", "Kisumu"))
    assert read == {"pages": 3, "read_pages": 2, "text": "Mombasa\n\nNai"}


@pytest.mark.parametrize(
    "data", [b"", b"%PDF-", b"\x00" * 1000, pdf("a")[:200], pdf("a").replace(b"Kids", b"Kidz")]
)
def test_broken_files_are_answers(data):
    assert "error" in pdf_worker.read_text(data)
