"""GGUF tokenizers: a file's tokenizer and chat template as the files of a model directory.

Keys and kinds: the GGUF specification (docs/gguf.md of ggml). How texts are cut before byte pairs are
merged is said by a name only, `tokenizer.ggml.pre`. What the names mean is in llama.cpp's src/llama-
vocab.cpp; what is built here is the tokenizer.json of the models that they come from.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmbox.engine.errors import ModelError

from .tokenizer_safety import (
    DEEPSEEK,
    DEEPSEEK_CJK,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    KIMI,
    O200K,
    QWEN3_5,
    SEED,
    TEKKEN,
    YOUTU,
    YOUTU_CJK,
)

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Final = {
    "llama-bpe": (_GPT4.format(digits=r"\p{N}{1,3}"),),
    "dbrx": (_GPT4.format(digits=r"\p{N}{1,3}"),),
    "qwen2": (_GPT4.format(digits=r"\p{N}"),),
    "hunyuan": (_GPT4.format(digits=r"\p{N}"),),
    "qwen35": (QWEN3_5,),
    "tekken": (TEKKEN,),
    "gpt-4o": (O200K,),
    "deepseek-v3": (r"\p{N}{1,3}", DEEPSEEK_CJK, DEEPSEEK),
    "seed-coder": (SEED,),
    "kimi-k2": (KIMI,),
    "youtu": (YOUTU_CJK, YOUTU),
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-llm": DEEPSEEK_LLM,
}
"""Patterns by which texts are cut, one after the other."""
_ALIASES: Final = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "jina-v5-nano"), "llama-bpe"
    ),
    **dict.fromkeys(("phi-2", "gigachat", "mellum", "a.x-4.0", "jina-v2-es", "jina-v2-de"), "default"),
    "f2llmv2": "qwen2",
    "kormo": "hunyuan",
    "kanana2": "gpt-4o",
    "joyai-llm": "deepseek-v3",
    "jina-v1-en": "roberta-bpe",
    "deepseek-r1-qwen": "qwen2",
    "gpt-2": "default",
    "olmo": "default",
    "exaone4": "default",
    "granite-docling": "default",
    "pixtral": "tekken",
    "llama4": "gpt-4o",
    "minimax-m2": "gpt-4o",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "smaug-bpe": "dbrx",
    "hunyuan-dense": "deepseek-v3",
    "solar-open": "hunyuan",
    "stablelm2": "hunyuan",
}
_BY_DIGIT: Final = {"smollm", "starcoder", "refact", "command-r", "exaone"}
"""Digits one by one, then as GPT-2."""
_BEGINNING: Final = {"llama-bpe", "tekken"}
"""Texts have the beginning token where the file does not say it."""
_WORDS_FIRST: Final = {*_BEGINNING, "youtu", "kimi-k2"}
"""A word of the vocabulary is taken whole, however its pieces would merge."""
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
SPACE: Final = "▁"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from a file's metadata. Raises ModelError."""
    words = _Words(metadata)
    tokenizer = _BUILDERS[words.kind](words)
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word in words.of_kind(_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words.of_kind(_USER)])
    if words.has_ends:
        tokenizer.post_processor = _around(words)
    elif words.begin is not None or words.end is not None:
        single = " ".join(filter(None, (words.begin, "$A", words.end)))
        names = dict.fromkeys(filter(None, (words.begin, words.end)))
        _check_names(names)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=f"{single} {single.replace('$A', '$B')}",
            special_tokens=[(name, words.words.index(name)) for name in names],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(words.config, indent=2) + "\n", encoding="utf-8")


class _Words:
    """Checked vocabulary of the metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.kind = self._get("model")
        if self.kind not in _KINDS:
            raise _unknown(f"its tokenizer is of kind {self.kind!r}, only {', '.join(_KINDS)} can be read")
        self.words = self._list("tokens", str)
        self.kinds = self._list("token_type", int) or [_NORMAL] * len(self.words)
        self.merges = self._list("merges", str)
        self.scores = self._list("scores", float)
        if not self.words or len(self.kinds) != len(self.words) or len(set(self.words)) != len(self.words):
            raise _unknown("its vocabulary is empty, holds a word twice, or lacks the types of words")

    @property
    def pre(self) -> str:
        name = self._get("pre") or "default"
        return _ALIASES.get(name, name)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Vocabulary without tokens that only pad the table to a round size."""
        kinds = zip(self.words, self.kinds, strict=True)
        return {word: i for i, (word, kind) in enumerate(kinds) if kind != _UNUSED}

    @property
    def begin(self) -> str | None:
        """Beginning-of-text token, None if texts have none."""
        does = self._get("add_bos_token")
        if does is None:
            does = self.kind == "llama" or self.pre in _BEGINNING
        return self.named("bos") if does else None

    @property
    def end(self) -> str | None:
        """End token that is put behind a text, None if there is none: models for embeddings have one."""
        return self.named("eos") if self._get("add_eos_token") else None

    @property
    def has_ends(self) -> bool:
        """True for an encoder, which has a token before each text and one behind it."""
        if self.kind in _AROUND or self.pre == "roberta-bpe":
            return True
        return self.pre == "modern-bert" and bool(self._get("add_sep_token"))

    @property
    def space_prefix(self) -> bool:
        return self._get("add_space_prefix") is not False

    @property
    def config(self) -> dict[str, Any]:
        keys = _NAMED_BERT if self.has_ends else _NAMED
        names = {f"{name}_token": self.named(key) for name, key in keys.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.begin is not None,
            **names,
        }
        template = self._metadata.get("tokenizer.chat_template")
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def named(self, name: str) -> str | None:
        number = self._get(f"{name}_token_id")
        return self.words[number] if isinstance(number, int) and 0 <= number < len(self.words) else None

    def of_kind(self, *kinds: int) -> list[str]:
        return [word for word, kind in zip(self.words, self.kinds, strict=True) if kind in kinds]

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise _unknown(f"tokenizer.ggml.{key} is not a list of the expected type")
        return value

    @property
    def charsmap(self) -> bytes:
        """Table of SentencePiece's normalization; empty: there is none."""
        value = self._get("precompiled_charsmap") or []
        if not isinstance(value, list) or not all(
            isinstance(each, int) and -128 <= each < 256 for each in value
        ):
            raise _unknown("tokenizer.ggml.precompiled_charsmap is not a list of bytes")
        return bytes(each & 255 for each in value)


_NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED_BERT: Final = {"cls": "cls", "sep": "seperator", "mask": "mask", "unk": "unknown", "pad": "padding"}
"""Special tokens of encoders; ggml's spelling."""


def _of_bytes(words: _Words) -> Tokenizer:
    """Build a byte-level BPE tokenizer, with merges in the order of their list (as GPT-2)."""
    merges = [tuple(each.split(" ", 1)) for each in words.merges]
    try:
        model = models.BPE(words.vocabulary, merges, ignore_merges=words.pre in _WORDS_FIRST)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise _unknown(f"its merges do not match its vocabulary ({str(error).splitlines()[0]})") from None
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    if words.pre in _PATTERNS:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[words.pre]]
        tokenizer.pre_tokenizer = _sequence(*cuts, use_regex=False)
    elif words.pre in _BY_DIGIT:
        tokenizer.pre_tokenizer = _sequence(pre_tokenizers.Digits(individual_digits=True), use_regex=True)
    elif words.pre in ("default", "modern-bert", "roberta-bpe"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise _unknown(f"its pre-tokenizer {words.pre!r} is not supported")
    if words.pre in ("qwen2", "qwen35", "modern-bert"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sequence(*first: Any, use_regex: bool) -> Any:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*first, bytes_])


def _of_pieces(words: _Words) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer: neighbors merge to the best scored piece, or in the order of the
    file's merges; characters without a piece are spelt in bytes.
    """
    if words.kind == "gemma4":
        merges = [tuple(each.split(" ", 1)) for each in words.merges]
    elif len(words.scores) == len(words.words):
        merges = merges_of(words.vocabulary, words.scores)
    else:
        raise _unknown("its pieces have no scores")
    unknown = words.of_kind(_UNKNOWN)
    model = models.BPE(
        words.vocabulary,
        merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=_BYTE in words.kinds,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    strip: list[Any] = []
    if words.space_prefix:
        spaces.insert(0, normalizers.Prepend(SPACE))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _of_words(words: _Words) -> Tokenizer:
    """Build BERT's WordPiece. A GGUF file marks the pieces that begin a word; the original marks those that
    continue one. It does not say whether case matters: it does if some pieces have capitals.
    """
    whole = words.vocabulary
    known = {_original_word(word): number for word, number in whole.items()}
    if len(known) != len(whole):
        raise _unknown("two of its words are the same")
    unknown = words.named("unknown") or "[UNK]"
    if unknown not in known:
        raise _unknown("it has no token for unknown words")
    tokenizer = Tokenizer(models.WordPiece(known, unk_token=unknown))
    lower = not any(any(map(str.isupper, word)) for word in known if not _is_bracketed(word))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _original_word(word: str) -> str:
    if _is_bracketed(word):
        return word
    return word[1:] if word.startswith(SPACE) else f"##{word}"


def _is_bracketed(word: str) -> bool:
    return word.startswith("[") and word.endswith("]")


def _of_scores(words: _Words) -> Tokenizer:
    """Build a SentencePiece unigram model, as XLM-R has."""
    if len(words.scores) != len(words.words):
        raise _unknown("its pieces have no scores")
    number = words.named("unknown")
    pieces = list(zip(words.words, words.scores, strict=True))
    unknown = words.words.index(number) if number is not None else 0
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=_BYTE in words.kinds))
    steps: list[Any] = []
    if words.charsmap:
        try:
            steps.append(normalizers.Precompiled(words.charsmap))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise _unknown(f"its table of normalization cannot be read ({error})") from None
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if words.space_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return tokenizer


def _around(words: _Words) -> Any:
    """Return the post-processor that puts an encoder's special tokens around texts. RoBERTa and XLM-R write
    two of them after the first text of a pair.
    """
    first, last = words.named("cls") or words.named("bos"), words.named("seperator") or words.named("eos")
    if first is None or last is None:
        raise _unknown("it does not name the tokens around a text")
    _check_names((first, last))
    ends_twice = words.kind == "t5" or words.pre == "roberta-bpe"
    between = f"{last}:0 {last}:0" if ends_twice else f"{last}:0"
    second = "1" if words.kind == "bert" else "0"
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {between} $B:{second} {last}:{second}",
        special_tokens=[(each, words.words.index(each)) for each in dict.fromkeys((first, last))],
    )


def _check_names(names: Iterable[str]) -> None:
    """Raise ModelError for tokens that a template cannot name."""
    if odd := [each for each in names if re.search(r"[\s:$]", each)]:
        raise _unknown(f"{odd[0]!r} cannot be one of the tokens around a text")


_AROUND: Final = {"bert", "t5"}
"""Kinds of tokenizers that only encoders have."""
_BUILDERS: Final[dict[str, Callable[[_Words], Tokenizer]]] = {
    "gpt2": _of_bytes,
    "llama": _of_pieces,
    "gemma4": _of_pieces,
    "bert": _of_words,
    "t5": _of_scores,
}
_KINDS: Final = tuple(_BUILDERS)


def merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best scored pieces first; among a piece's pairs, the one
    with the earliest pieces first.
    """
    found = []
    for piece, number in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right, cut))
    found.sort()
    names = list(vocabulary)
    by_number = dict(zip(vocabulary.values(), names, strict=True))
    return [(by_number[left], by_number[right]) for _, _, left, right, _ in found]


def _unknown(why: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be read from the file: {why}; `llmbox import FILE --tokenizer FOLDER` takes "
        "that of a folder with the original model's tokenizer.json"
    )
