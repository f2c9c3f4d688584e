"""Tokenizer safety: decide whether a tokenizer may work in the daemon: its time and memory must grow in
proportion to a text.

A step of a pipeline can be hostile: chained replacements double a text each, a regex backtracks for ever. So
only steps that are listed here, with bounded parameters, work in the daemon. A file with any other step is
no less welcome, but its tokenizer works in a separate process (`sandboxed_encoder.py`).
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

MOST_STEPS: Final = 16
MOST_GROWTH: Final = 4.0
"""Bound on the growth of a text by all replacements of one part together."""
MOST_ADDED: Final = 65_536
LONGEST_ADDED: Final = 128
"""Characters of an added token, and of anything that a step inserts."""
LONGEST_UNIGRAM: Final = 512
"""Characters of a token that Unigram may look up at each character."""
LONGEST_WORD: Final = 200
"""Characters of a word for which WordPiece looks up all beginnings of all rests."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CJK: Final = "[一-龥\u3040-ゟ\u30a0-ヿ]+"
QWEN3_5: Final = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NO_HAN = r"&&[^\p{Han}]"
KIMI: Final = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_REST}"
)
YOUTU_CJK: Final = (
    "[가-힣ㄱ-ㆎ]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ\u30a0-ヿ]+"
)
YOUTU: Final = O200K.replace(r"\p{N}{1,3}", r"\p{N}")
_CJK: Final = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK_CODER: Final = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
DEEPSEEK_LLM: Final = (
    "[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",
    _CJK,
    r"\p{N}",
)
"""DeepSeek V2. The original names each letter with case; those of later versions of Unicode are not among
them. It has no `(?<!\\s)`, which changes no match and keeps the time in proportion to the text.
"""
KNOWN_REGEXES: Final = frozenset(
    {
        # GPT-2 and its heirs
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3, cl100k; Qwen2 and Qwen3; Qwen3.5
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
        QWEN3_5,
        # Seed
        SEED,
        # o200k: GPT-4o, gpt-oss, Phi-4-mini; Mistral's tekken
        O200K,
        TEKKEN,
        # DeepSeek V3 and R1
        DEEPSEEK_CJK,
        DEEPSEEK,
        *DEEPSEEK_CODER,
        *DEEPSEEK_LLM,
        # Kimi, Youtu
        KIMI,
        YOUTU_CJK,
        YOUTU,
        # BLOOM, Falcon, numbers
        r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001 - as in the files
        r"\p{N}{1,3}",
        r"[0-9][0-9][0-9]",
        # SentencePiece: runs of blanks
        r" {2,}",
        r"\A | \z",
        r"\s+",
    }
)
"""Split patterns of well-known models. Each takes time in proportion to the text."""
_SAFE_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer", "ByteLevel"}
)
_SAFE_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation",
        "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    }
)  # fmt: skip
_SAFE_POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing"})


class _Model(msgspec.Struct):
    """Scalars of the tokenizer's model alone: a vocabulary has hundreds of thousands of entries."""

    type: str | None = None
    max_input_chars_per_word: int = 100
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Unigram(msgspec.Struct):
    vocab: list[tuple[str, float]]


class _UnigramFile(msgspec.Struct):
    model: _Unigram


class _Added(msgspec.Struct):
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class _UnknownStepError(Exception):
    """Tokenizer step that is not known to be safe, which the message names."""


def find_unsafe_step(source: bytes) -> str:
    """Return the name of a step in this tokenizer.json that is not known to be safe; empty where all are.

    A file that is not JSON of this shape is not known to be safe either.
    """
    try:
        file = msgspec.json.decode(source, type=_TokenizerFile)
        _check_pipeline(file.normalizer, file.pre_tokenizer, file.post_processor)
        _check_model(file, source)
    except RecursionError:
        return "nesting that is too deep"
    except _UnknownStepError as unknown:
        return str(unknown)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError) as error:
        return f"a form that is not known ({error})"
    return ""


def replaced_growth(steps: list[dict[str, Any]]) -> float:
    """Return how many times longer all `Replace` among these steps can make a text; infinite where
    unknown.
    """
    growth = 1.0
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String") or step["pattern"].get("Regex")
            if not pattern or ("Regex" in step["pattern"] and pattern not in KNOWN_REGEXES):
                return math.inf
            shortest = len(pattern) if "String" in step["pattern"] else 1
            growth *= max(1.0, len(step["content"]) / shortest)
    return growth


def find_unsafe_part(tokenizer: Tokenizer) -> str:
    """Return the same as `find_unsafe_step`, for the steps as the library has read them."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    try:
        _check_pipeline(*(None if part is None else json.loads(part.__getstate__()) for part in parts))
    except _UnknownStepError as unknown:
        return str(unknown)
    return ""


def _check_pipeline(
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    post_processor: dict[str, Any] | None,
) -> None:
    _check_steps(normalizer, "normalizers", _check_normalizer)
    _check_steps(pre_tokenizer, "pretokenizers", _check_pre_tokenizer)
    _check_steps(post_processor, "processors", _check_post_processor)


def _check_model(file: _TokenizerFile, source: bytes) -> None:
    if len(file.added_tokens) > MOST_ADDED:
        raise _UnknownStepError(f"{len(file.added_tokens)} added tokens")
    if any(len(token.content) > LONGEST_ADDED for token in file.added_tokens):
        raise _UnknownStepError("a very long added token")
    if file.model.type not in {"BPE", "WordPiece", "WordLevel", "Unigram"}:
        raise _UnknownStepError(f"model {file.model.type}")
    if file.model.max_input_chars_per_word > LONGEST_WORD:
        raise _UnknownStepError("words of any length for WordPiece")
    for affix in (file.model.continuing_subword_prefix, file.model.end_of_word_suffix):
        if len(affix or "") > LONGEST_ADDED:
            raise _UnknownStepError("a very long prefix or suffix of parts of words")
    if file.model.type == "Unigram":
        tokens = msgspec.json.decode(source, type=_UnigramFile).model.vocab
        if any(len(token) > LONGEST_UNIGRAM for token, _ in tokens):
            raise _UnknownStepError("a very long token for Unigram")


def _flatten(step: dict[str, Any], inner: str) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for each in step[inner]:
            yield from _flatten(each, inner)
    else:
        yield step


def _check_steps(top: dict[str, Any] | None, inner: str, check: Callable[[dict[str, Any]], bool]) -> None:
    steps = [] if top is None else list(_flatten(top, inner))
    kinds = [step["type"] for step in steps]
    if len(steps) > MOST_STEPS or kinds.count("ByteLevel") > 1:
        raise _UnknownStepError(f"{len(steps)} steps in {inner}")
    for step in steps:
        if not check(step):
            raise _UnknownStepError(f"step {step['type']} in {inner}")
    if replaced_growth(steps) > MOST_GROWTH:
        raise _UnknownStepError(f"replacements in {inner} that make a text many times longer")


def _check_normalizer(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return _is_known_pattern(step) and len(step["content"]) <= LONGEST_ADDED
        case "Prepend":
            return len(step["prepend"]) <= LONGEST_ADDED
        case kind:
            return kind in _SAFE_NORMALIZERS


def _check_pre_tokenizer(step: dict[str, Any]) -> bool:
    return _is_known_pattern(step) if step["type"] == "Split" else step["type"] in _SAFE_PRE_TOKENIZERS


def _check_post_processor(step: dict[str, Any]) -> bool:
    if step["type"] != "TemplateProcessing":
        return step["type"] in _SAFE_POST_PROCESSORS
    texts = [piece for piece in step["single"] if "Sequence" in piece]
    longest = max((len(token["ids"]) for token in step["special_tokens"].values()), default=0)
    return len(texts) == 1 and len(step["single"]) <= MOST_STEPS and longest <= LONGEST_ADDED


def _is_known_pattern(step: dict[str, Any]) -> bool:
    pattern = step["pattern"]
    return bool(pattern.get("String")) or pattern.get("Regex") in KNOWN_REGEXES
