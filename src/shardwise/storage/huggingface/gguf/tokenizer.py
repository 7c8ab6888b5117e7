"""The tokenizer and the chat template of a GGUF file, written as ``tokenizer.json`` and ``tokenizer_config.json``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from shardwise.core.errors import DataError
from shardwise.core.json_text import shown
from shardwise.data.tokenizer.library import panics_as_errors

_CONTROL, _USER_DEFINED = 3, 4
# SentencePiece's own limit is far below; every cut of a token is looked up.
_LONGEST_TOKEN = 1024
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _PLAIN])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How a text is cut into words, by ``tokenizer.ggml.pre``.
_WORDS = {
    "gpt-2": _PLAIN,
    "smollm": _DIGITS,
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_LLAMA3.replace("{1,3}", "")),
}
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(values: Mapping[str, Any], folder: Path, path: Path) -> None:
    """Write the tokenizer of the metadata ``values`` of the file at ``path`` to a folder; nothing if it has none.

    Raises:
        DataError: the tokenizer is of an unknown kind or damaged.
    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items() if key.startswith("tokenizer.")}
    if "tokens" not in own:
        return
    try:
        with panics_as_errors(f"be read from {path}"):
            backend, names = _made(own, str(values["general.architecture"]))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: its tokenizer is damaged ({error!s:.200}); use another copy") from error
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    if (template := own.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise DataError(f"{path}: tokenizer.chat_template is {shown(template)}; it must be a text")
        config["chat_template"] = template
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _made(own: Mapping[str, Any], architecture: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    kind, tokens = own.get("model"), own["tokens"]
    if not isinstance(tokens, list) or len(set(tokens)) < len(tokens):
        raise DataError("tokenizer.ggml.tokens must be a list of different tokens")
    for key in _ROLES.values():
        if key in own and (type(own[key]) is not int or not 0 <= own[key] < len(tokens)):
            raise DataError(f"tokenizer.ggml.{key} is {shown(own[key])}; it must be from 0 to {len(tokens) - 1}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if not isinstance(own.get(key, False), bool):
            raise DataError(f"tokenizer.ggml.{key} is {shown(own[key])}; it must be true or false")
    types = own.get("token_type")
    if types is not None and (not isinstance(types, list | np.ndarray) or len(types) != len(tokens)):
        raise DataError("tokenizer.ggml.token_type must have a number for each token")
    if kind == "gpt2":
        backend, begins = _byte_level(own, tokens)
    elif kind == "llama":
        backend, begins = _sentencepiece(own, tokens, architecture)
    else:
        raise DataError(f"its tokenizer is of kind {shown(kind)}; gpt2 and llama are read")
    names = {role: tokens[own[key]] for role, key in _ROLES.items() if key in own}
    named = set(names.values())
    special, others = list[AddedToken](), list[AddedToken]()
    for token, its_type in zip(tokens, [] if types is None else types, strict=types is not None):
        if its_type == _CONTROL or token in named:
            special.append(AddedToken(token, normalized=False))
        elif its_type == _USER_DEFINED and backend.token_to_id(token) is not None:
            others.append(AddedToken(token, normalized=False))
    # Once each: a call takes time for all tokens that were added before.
    backend.add_special_tokens(special)
    backend.add_tokens(others)
    before = [names["bos_token"]] if own.get("add_bos_token", begins) and "bos_token" in names else []
    after = [names["eos_token"]] if own.get("add_eos_token", False) and "eos_token" in names else []
    if before or after:
        ids = [(name, backend.token_to_id(name)) for name in (*before, *after)]
        backend.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=ids)
    return backend, names


def _byte_level(own: Mapping[str, Any], tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = own.get("pre")
    if pre not in _WORDS:
        raise DataError(f"its tokenizer cuts words by the rule {shown(pre)}; the rules {', '.join(_WORDS)} are known")
    merges = [tuple(merge.split(" ")) for merge in own.get("merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    is_llama = pre == "llama-bpe"
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_llama))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer, backend.decoder = _WORDS[pre], decoders.ByteLevel()
    return backend, is_llama


def _sentencepiece(
    own: Mapping[str, Any], tokens: Sequence[str], architecture: str
) -> tuple[tokenizers.Tokenizer, bool]:
    is_gemma = architecture.startswith("gemma")
    if is_gemma:
        # llama.cpp writes runs of blanks as such.
        tokens = ["▁" * len(token) if token.isspace() and set(token) == {" "} else token for token in tokens]
    scores = own.get("scores", ())
    if not is_gemma and len(scores) != len(tokens):
        raise DataError("tokenizer.ggml.scores must have a score for each token")
    # Gemma's scores are not those of its merges, whose order is that of its tokens.
    ranks = [-float(score) for score in scores] if not is_gemma else list(map(float, range(len(tokens))))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = tokens[own["unknown_token_id"]] if "unknown_token_id" in own else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges(vocabulary, ranks), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    to_blank = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if own.get("add_space_prefix", not is_gemma):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_blank])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_blank
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges(vocabulary: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's tokens and their ranks imply, in their order."""
    found = []
    for token, number in vocabulary.items():
        if len(token) > _LONGEST_TOKEN:
            raise DataError(f"token {number} has {len(token)} characters; at most {_LONGEST_TOKEN} are read")
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        found += [(ranks[number], -len(left), -len(right), left, right) for left, right in pairs]
    found.sort(key=lambda each: each[:3])
    return [(left, right) for *_, left, right in found]
