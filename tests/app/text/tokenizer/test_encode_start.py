"""A text cut to so many ids keeps the tokens that its tokenizer puts around texts."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import TextModel
from support.tokenizers_zoo import byte_level, write_text_files

TEXT = "the quick brown fox jumps over the lazy dog"


def model_text(folder: Path, template: str | None) -> TextModel:
    write_text_files(folder, byte_level())
    if template is not None:
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        ids = [(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=ids
        )
        tokenizer.save(file)
    return load_model_text(folder)


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (None, 0, 0),
        ("$A <|im_end|>", 0, 1),
        ("<|im_start|> $A", 1, 0),
        ("<|im_start|> $A <|im_end|> <|im_end|>", 1, 2),
    ],
)
def test_the_beginning_and_what_stands_around(tmp_path, template, before, after):
    text = model_text(tmp_path, template)
    whole = text.encode(TEXT)
    assert text.encode_start(TEXT, len(whole)) == whole
    assert text.encode_start(TEXT, len(whole) + 5) == whole
    for most in range(before + after, len(whole)):
        kept = most - after
        assert text.encode_start(TEXT, most) == whole[:kept] + whole[len(whole) - after :]


def test_room_for_less_than_stands_around(tmp_path):
    text = model_text(tmp_path, "<|im_start|> $A <|im_end|> <|im_end|>")
    assert text.encode_start(TEXT, 2) == text.encode(TEXT)[:2]
