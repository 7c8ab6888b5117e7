"""``generation_config.json``: a model's sampling settings, and the tokens that end a text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import ConfigError
from shardwise.core.json_text import first_of, shown
from shardwise.models.generation import Sampling
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.pretrained import CONFIG_NAME
from shardwise.storage.huggingface.tensor_folder import read_json

GENERATION_CONFIG_NAME = "generation_config.json"

USUAL_SAMPLING = Sampling(temperature=0.8, top_k=50)
"""Sampling settings of a model without its own."""

USUAL_MAX_NEW_TOKENS = 200

_MOST_TOKENS = 10**9
_HIGHEST_TEMPERATURE = 1e6

_READ = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "max_new_tokens",
    "max_length",
    "eos_token_id",
)
# These fields concern memory, speed, outputs, or other methods of generation.
_ABOUT_OTHER_THINGS = """
_from_model_config transformers_version bos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation
cache_config max_cache_len return_legacy_cache return_dict_in_generate output_attentions output_hidden_states
output_logits output_scores early_stopping length_penalty low_memory renormalize_logits remove_invalid_values
compile_config disable_compile continuous_batching_config prefill_chunk_size is_assistant num_assistant_tokens
num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind
target_lookbehind assistant_ensemble_weight max_matching_ngram_size prompt_lookup_num_tokens speculation_type use_mtp
"""
_WITHOUT_EFFECT = frozenset(_ABOUT_OTHER_THINGS.split())
# Values other than null and false that have no effect.
_NEUTRAL = dict.fromkeys(
    (
        "encoder_repetition_penalty",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "typical_p",
        "guidance_scale",
    ),
    1,
)


@dataclass(frozen=True)
class GenerationChoice:
    """Settings of a continuation: end tokens (the tokenizer's first), and notes on settings without effect."""

    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


class GenerationDefaults:
    """A model's own settings of generation, from ``generation_config.json``, and ``config.json`` for end tokens."""

    def __init__(self, folder: Path | None = None, config: Mapping[str, Any] | None = None) -> None:
        path = None if folder is None else folder / GENERATION_CONFIG_NAME
        values = read_json(path) if path is not None and path.exists() else {}
        self._fields = Fields(values, str(path))
        self._config = Fields(config or {}, CONFIG_NAME if folder is None else str(folder / CONFIG_NAME))

    def choose(
        self,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        max_new_tokens: int | None = None,
        num_prompt_tokens: int = 0,
        vocab_size: int,
        eos_id: int,
    ) -> GenerationChoice:
        """Choose settings: the values given here, or else the model's, or else the defaults; raise ConfigError.

        With ``do_sample: true``, fields that the file omits have the defaults of ``transformers``: temperature 1, top-k
        50. With ``do_sample: false``, the most likely token is taken unless a temperature is given. The prompt counts
        towards ``max_length``, and ``eos_id`` always ends a text.
        """
        notes = self._unsupported()
        samples = self._fields.optional(bool, "do_sample")
        if temperature is not None:
            heat = temperature
        elif samples is False:
            heat = 0.0
            if unused := [
                name
                for name, value in (("--top-k", top_k), ("--top-p", top_p), ("--min-p", min_p))
                if value is not None
            ]:
                notes.append(
                    f"{' and '.join(unused)} without --temperature: {GENERATION_CONFIG_NAME} says do_sample false, so "
                    "that the likeliest token is taken"
                )
        else:
            usual = 1.0 if samples else USUAL_SAMPLING.temperature
            heat = self._fields.get(float, "temperature", default=usual, within=(0, _HIGHEST_TEMPERATURE))
        count = self._num_tokens("top_k", USUAL_SAMPLING.top_k) if top_k is None else top_k
        share = (
            self._fields.get(float, "top_p", default=USUAL_SAMPLING.top_p, within=(0, 1)) if top_p is None else top_p
        )
        if share == 0:
            raise self._fields.error("top_p", share, "over 0 and at most 1")
        others = {
            name: self._fields.get(float, name, default=getattr(USUAL_SAMPLING, name), within=(low, high))
            if given is None
            else given
            for name, given, low, high in (
                ("min_p", min_p, 0, 1),
                ("repetition_penalty", repetition_penalty, 1e-6, 1e6),
                ("presence_penalty", presence_penalty, -1e6, 1e6),
            )
        }
        eos_ids = dict.fromkeys((eos_id, *self.eos_ids()))
        if outside := [token for token in eos_ids if not 0 <= token < vocab_size]:
            notes.append(f"eos_token_id {_listed(outside)} is outside the model's {vocab_size} ids and ends no text")
        return GenerationChoice(
            Sampling(heat, count, share, **others),
            self._max_new_tokens(num_prompt_tokens) if max_new_tokens is None else max_new_tokens,
            tuple(token for token in eos_ids if token not in outside),
            tuple(notes),
        )

    def _says(self, name: str) -> bool:
        return self._fields.values.get(name) is not None

    def _num_tokens(self, name: str, default: int) -> int:
        return self._fields.get(int, name, default=default, within=(0, _MOST_TOKENS))

    def _max_new_tokens(self, num_prompt_tokens: int) -> int:
        if self._says("max_new_tokens") or not self._says("max_length"):
            return self._num_tokens("max_new_tokens", USUAL_MAX_NEW_TOKENS)
        longest = self._num_tokens("max_length", 0)
        if num_prompt_tokens >= longest:
            raise ConfigError(
                f"the prompt has {num_prompt_tokens} tokens, and {self._fields.where} says max_length {longest}, "
                "prompt included; pass --max-new-tokens"
            )
        return longest - num_prompt_tokens

    def eos_ids(self) -> list[int]:
        """Return the tokens that end a text by the model's files. Raises ConfigError if they are no integers."""
        fields = self._fields if self._says("eos_token_id") else self._config
        value = fields.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise fields.error("eos_token_id", value, "an integer or a list of integers")
        return ids

    def _unsupported(self) -> list[str]:
        ignored = [
            f"{name} {shown(value)}"
            for name, value in self._fields.values.items()
            if name not in _READ and name not in _WITHOUT_EFFECT and value and value != _NEUTRAL.get(name)
        ]
        what = f"{GENERATION_CONFIG_NAME} asks for what is not supported, and is ignored"
        return [f"{what}: {', '.join(ignored)}"] if ignored else []


def eos_ids_of(folder: Path) -> list[int]:
    """Return the tokens that end a text by the files of a folder; raise CheckpointError or ConfigError if damaged."""
    config = folder / CONFIG_NAME
    return GenerationDefaults(folder, read_json(config) if config.exists() else {}).eos_ids()


def write_eos_ids(folder: Path, eos_ids: Sequence[int]) -> None:
    """Write the tokens that end a text into ``generation_config.json``, which is made if it is missing."""
    path = folder / GENERATION_CONFIG_NAME
    values = read_json(path) if path.exists() else {}
    values |= {"eos_token_id": list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]}
    write_atomically(path, lambda file: file.write((json.dumps(values, indent=2) + "\n").encode()))


def _listed(ids: list[int]) -> str:
    return first_of([str(token)[:20] for token in ids], 5)
