"""Builder of tokenizer.json for models that come without: from `tekken.json`, from a SentencePiece
`tokenizer.model`, from `vocab.json` and `merges.txt`, or from `vocab.txt`.

The files are not trusted: `python -P -m llmbox.app.text.tokenizer.tokenizer_builder FOLDER SECONDS MEMORY`
reads them in a process with limits and writes to stdout. The result is checked like any tokenizer.json.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from llmbox.engine.checkpoint.files import MAX_BYTES, parse_json, read_regular
from llmbox.engine.errors import ModelError

from ...sandbox.worker import limit_process
from .detokenizer import BYTE_ALPHABET
from .sentencepiece_file import BYTE, CONTROL, SPACE, UNKNOWN, USER, SentencePieceFile

SOURCES: Final = (("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""Files to build from, the first that are all there."""
_SECONDS: Final = 60.0
"""CPU time. A vocabulary of 262,144 pieces takes some seconds."""
_WAIT_SECONDS: Final = 240.0
_MEMORY: Final = 4 << 30
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Final = {
    "GPT2": _GPT2, "CodeGen": _GPT2, "Roberta": _GPT2, "Bart": _GPT2, "GPTNeoX": _GPT2,
    "Qwen2": _QWEN2, "Qwen3_5": _QWEN3_5,
}  # fmt: skip
"""Split patterns of byte-level tokenizers, by classes in tokenizer_config.json without `Tokenizer`."""
_TEKKEN_SPECIAL: Final = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of a tekken.json that does not list them."""


def find_source(folder: Path) -> str | None:
    """Return the name of the file to build from, None where there is none."""
    found = next((names for names in SOURCES if all((folder / name).is_file() for name in names)), None)
    return None if found is None else found[0]


def build_source(folder: Path) -> bytes:
    """Build tokenizer.json in a separate process. Raises ModelError with the reason."""
    name = find_source(folder)
    command = [sys.executable, "-P", "-m", __spec__.name, str(folder), str(_SECONDS), str(_MEMORY)]
    passed = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command,
            capture_output=True,
            timeout=_WAIT_SECONDS,
            check=False,
            env=passed,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{name} cannot be read: it takes too long") from None
    if done.returncode == -signal.SIGPROF:
        raise ModelError(f"{name} cannot be read: it takes more than {_SECONDS:g} s of CPU time")
    if done.returncode != 0 or not done.stdout:
        raise ModelError(f"{name} cannot be read: its reader crashed")
    if done.stdout.startswith(b"!"):
        raise ModelError(f"{name} cannot be read: {done.stdout[1:].decode('utf-8', 'replace')}")
    return done.stdout


def build(folder: Path) -> dict[str, Any]:
    """Build the contents of tokenizer.json. Raises ValueError, KeyError or TypeError for broken files."""
    config = _read_object(folder, "tokenizer_config.json")
    added = _added_tokens(folder, config)
    match find_source(folder):
        case "tekken.json":
            return _from_tekken(_read_object(folder, "tekken.json"), config)
        case "tokenizer.model":
            return _from_pieces(read_regular(folder / "tokenizer.model", MAX_BYTES), config, added)
        case "vocab.json":
            return _from_merges(folder, config, added)
        case "vocab.txt":
            return _from_words(folder, config, added)
    raise ValueError("there is no tokenizer file")


# ---------------------------------------------------------------------- SentencePiece


def _from_pieces(data: bytes, config: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Build from a SentencePiece model: byte pairs or a unigram model."""
    model = SentencePieceFile(data)
    prefixes = bool(config.get("add_prefix_space", model.add_prefix))
    tokens = _piece_tokens(model, prefixes=prefixes) | {each["id"]: each for each in added}
    known = {word: number for number, word in enumerate(model.words)}
    for number, each in tokens.items():
        known.setdefault(each["content"], number)
    kinds = list(zip(model.words, model.kinds, strict=True))
    unknown = next((word for word, kind in kinds if kind == UNKNOWN), None)
    normal = {
        word: number for number, (word, kind) in enumerate(kinds) if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    normalizers, decoders = _piece_steps(model, prefixes=prefixes)
    return {
        "version": "1.0",
        "added_tokens": sorted(tokens.values(), key=lambda each: each["id"]),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _around(config, known, begin=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model.byte_pairs(known, normal, unknown) if model.is_bpe else model.unigram(known, unknown),
    }


def _piece_tokens(model: SentencePieceFile, *, prefixes: bool) -> dict[int, dict[str, Any]]:
    """Return the special tokens and those of the user, by id. `prefixes`: a space is put before each text."""
    found = {}
    for number, (word, kind) in enumerate(zip(model.words, model.kinds, strict=True)):
        has_space = SPACE in word
        if kind in (UNKNOWN, CONTROL):
            found[number] = _added(number, word)
        elif kind == USER and not (has_space and prefixes):
            # Pieces with marks for spaces are found in the text as it is after normalization.
            found[number] = _added(number, word, special=False, normalized=has_space)
    return found


def _piece_steps(
    model: SentencePieceFile, *, prefixes: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the normalizers of a SentencePiece model, and its decoders."""
    normalizers: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.strips:
        normalizers += [
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Replace", "pattern": {"Regex": r"\A | \z"}, "content": ""},
        ]
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefixes:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return normalizers, decoders


# ---------------------------------------------------------------------- byte-level


def _from_tekken(file: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Build from Mistral's tekken.json: special tokens first, then tokens by their rank."""
    settings = file["config"]
    count = int(settings["default_num_special_tokens"])
    size = int(settings["default_vocab_size"])
    listed = file.get("special_tokens") or [
        {"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_SPECIAL[:count])
    ]
    special = {int(each["rank"]): str(each["token_str"]) for each in listed}
    names = [special.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
    words = [base64.b64decode(each["token_bytes"]) for each in file["vocab"][: size - count]]
    ranks = {word: rank for rank, word in enumerate(words)}
    if any(int(each["rank"]) != rank for rank, each in enumerate(file["vocab"][: size - count])):
        raise ValueError("its tokens are not in the order of their ranks")
    merges = []
    for word in words:
        pairs = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        found = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [[_printable(a), _printable(b)] for _, _, a, b in sorted(found)]
    known = {name: rank for rank, name in enumerate(names)}
    known |= {_printable(word): count + rank for rank, word in enumerate(words)}
    begin = {"bos_token": "<s>", "eos_token": "</s>", **config}
    return _byte_level(
        known, merges, str(settings["pattern"]), [_added(rank, name) for rank, name in enumerate(names)],
        _around(begin, known, begin=True), whole_words=True,
    )  # fmt: skip


def _from_merges(folder: Path, config: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Build from GPT-2's files, as the class in tokenizer_config.json cuts texts."""
    kind = str(config.get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast").removesuffix("Tokenizer")
    if kind not in _PATTERNS:
        raise ValueError(
            f"its tokenizer is of class {kind}Tokenizer; known are {', '.join(sorted(_PATTERNS))}"
        )
    known = {str(word): int(number) for word, number in _read_object(folder, "vocab.json").items()}
    known |= {each["content"]: each["id"] for each in added}
    lines = read_regular(folder / "merges.txt", MAX_BYTES).decode("utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    made = _byte_level(known, merges, _PATTERNS[kind], added, _around(config, known, begin=False))
    if kind.startswith("Qwen"):
        made["normalizer"] = {"type": "NFC"}
    if config.get("add_prefix_space"):
        made["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    return made


def _byte_level(
    known: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    pattern: str,
    added: list[dict[str, Any]],
    around: dict[str, Any] | None,
    *,
    whole_words: bool = False,
) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, level]},
        "post_processor": around,
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": known, "merges": merges, "ignore_merges": whole_words},
    }


def _printable(word: bytes) -> str:
    return "".join(BYTE_ALPHABET[byte] for byte in word)


# ---------------------------------------------------------------------- WordPiece


def _from_words(folder: Path, config: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Build from BERT's vocab.txt: one word a line. MPNet has other special tokens, and two between texts."""
    kind = str(config.get("tokenizer_class", "BertTokenizer")).removesuffix("Fast").removesuffix("Tokenizer")
    if kind not in {"Bert", "DistilBert", "MPNet"}:
        raise ValueError(f"its tokenizer is of class {kind}Tokenizer; known are Bert, DistilBert, MPNet")
    words = read_regular(folder / "vocab.txt", MAX_BYTES).decode("utf-8").splitlines()
    known = {word: number for number, word in enumerate(words)} | {
        each["content"]: each["id"] for each in added
    }
    is_mpnet = kind == "MPNet"
    special = _special_words(config, is_mpnet=is_mpnet)
    tokens = {known[each]: _added(known[each], each) for each in special.values() if each in known}
    tokens |= {each["id"]: each for each in added}
    first, last = special["cls_token"], special["sep_token"]
    single, other = [_special(first), _text("A"), _special(last)], 0 if is_mpnet else 1
    pair = [*single, *([_special(last)] if is_mpnet else []), _text("B", other), _special(last, other)]
    return {
        "version": "1.0",
        "added_tokens": [tokens[number] for number in sorted(tokens)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
            "strip_accents": config.get("strip_accents"),
            "lowercase": bool(config.get("do_lower_case", True)),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(single, pair, known, (first, last)),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": known,
        },
    }


def _special_words(config: Mapping[str, Any], *, is_mpnet: bool) -> dict[str, str]:
    """Return the special tokens by their keys in tokenizer_config.json."""
    usual = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    if not is_mpnet:
        usual = {name: f"[{name[:3].upper()}]" for name in usual} | {"mask_token": "[MASK]"}
    named = {name: config.get(name, content) for name, content in {"unk_token": "[UNK]", **usual}.items()}
    return {
        name: str(value.get("content") if isinstance(value, dict) else value) for name, value in named.items()
    }


# ---------------------------------------------------------------------- tokens beside the vocabulary


def _added(
    number: int, content: str, *, special: bool = True, normalized: bool = False, **sides: Any
) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": bool(sides.get("single_word", False)),
        "lstrip": bool(sides.get("lstrip", False)),
        "rstrip": bool(sides.get("rstrip", False)),
        "normalized": normalized,
        "special": special,
    }


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read added tokens of tokenizer_config.json and added_tokens.json, by id."""
    found: dict[int, dict[str, Any]] = {}
    for content, number in _read_object(folder, "added_tokens.json").items():
        found[int(number)] = _added(int(number), str(content), special=False)
    for key, each in (config.get("added_tokens_decoder") or {}).items():
        sides = {name: each.get(name, False) for name in ("single_word", "lstrip", "rstrip")}
        content, special = str(each["content"]), bool(each.get("special", True))
        normalized = bool(each.get("normalized", False))
        found[int(key)] = _added(int(key), content, special=special, normalized=normalized, **sides)
    return [found[number] for number in sorted(found)]


def _around(config: Mapping[str, Any], known: Mapping[str, int], *, begin: bool) -> dict[str, Any] | None:
    """Return the post-processor that puts the first and the last token around a text."""

    def named(key: str, usual: str) -> str | None:
        value = config.get(key, usual)
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) and content in known else None

    first = named("bos_token", "<s>") if config.get("add_bos_token", begin) else None
    last = named("eos_token", "</s>") if config.get("add_eos_token", False) else None
    if first is None and last is None:
        return None
    before, after = ([_special(each)] if each else [] for each in (first, last))
    single = [*before, _text("A"), *after]
    pair = [*single, *before, _text("B", 1), *after]
    return _template(single, pair, known, [each for each in (first, last) if each])


def _text(name: str, type_id: int = 0) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _special(token: str, type_id: int = 0) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _template(
    single: list[dict[str, Any]], pair: list[dict[str, Any]], known: Mapping[str, int], tokens: Sequence[str]
) -> dict[str, Any]:
    """Return a post-processor. `single`, `pair`: what it makes of one text and of two; `tokens`: the special
    tokens in them.
    """
    special = {each: {"id": each, "ids": [known[each]], "tokens": [each]} for each in tokens}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        return {}
    value = parse_json(read_regular(folder / name, MAX_BYTES).decode("utf-8"))
    if not isinstance(value, dict):
        raise TypeError(f"{name} holds no JSON object")
    return value


def main(folder: Path, seconds: float, memory: int) -> None:
    limit_process(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        made = json.dumps(build(folder), ensure_ascii=False).encode()
    except MemoryError:
        made = b"!it takes too much memory"
    except Exception as error:  # noqa: BLE001 - whatever a file does wrong is an answer, not a crash
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        made = f"!{kind}{re.sub(chr(10), ' ', str(error))[:300]}".encode("utf-8", "replace")
    sys.stdout.buffer.write(made)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
