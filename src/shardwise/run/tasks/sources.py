"""The sources of a run's data: their weights, token files, and the blend of several."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardwise.core.errors import ConfigError
from shardwise.data import HeldOut
from shardwise.data.blend import BlendedRows, blend_order, parse_blend
from shardwise.data.gpt_samples import GPTRows, GPTSamples, SampleCounts, documents_of, split_bounds
from shardwise.data.indexed import IndexedTokens, cached_arrays
from shardwise.data.json_records import counted, digest_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.settings import FinetuneSettings, RunSettings
from shardwise.run.tasks.task_data import TaskData, with_cache

# Megatron builds as many more samples of each source than it takes.
_SURPLUS = 1.005
# A validation part may be as large as a disk, and an evaluation takes this many batches at most.
_EVALUATED_BATCHES = 100
_DECODED_TOKENS = 1 << 20

Paths = tuple[str, ...]


def is_token_file(path: str) -> bool:
    """True for an index of token files."""
    return path.endswith(".idx")


def sources_of(data: Sequence[str]) -> tuple[list[Paths], list[float] | None]:
    """Return the sources of ``--data`` and their weights; files and folders without weights are one source.

    Raises:
        ConfigError: as ``parse_blend``, or token files and others have no weights.
    """
    names, weights = parse_blend(data)
    tokens = [is_token_file(name) for name in names]
    if weights is None and any(tokens) and not all(tokens):
        raise ConfigError(f"data is {names}: token files (.idx) and others need weights, such as 0.7 a.idx 0.3 texts")
    return [(name,) for name in names] if weights or all(tokens) else [tuple(names)], weights


def prepare_sources(settings: RunSettings, tokenizer: Tokenizer, prepare: Callable[[Paths], TaskData]) -> TaskData:
    """Prepare each source, and blend several.

    Args:
        settings: settings of the run.
        tokenizer: tokenizer of token files.
        prepare: prepares a source that is no token file.

    Raises:
        ConfigError: the samples of the run are more than token files without weights have, or a setting has no effect
            on token files or on a blend.
    """
    sources, weights = sources_of(settings.data)
    if settings.corpus.split is not None and not any(is_token_file(paths[0]) for paths in sources):
        raise ConfigError(f"--corpus.split {settings.corpus.split} is for token files (.idx), and data has none")
    if weights is None and not is_token_file(sources[0][0]):
        return prepare(sources[0])
    measured_apart = False
    if isinstance(settings, FinetuneSettings):
        measured_apart = bool(settings.samples.held_out)
        if settings.samples.epochs:
            raise ConfigError("--epochs is for files without weights; give --training.steps for a blend or .idx files")
    wanted = settings.training.steps * settings.training.global_batch_size
    parts = []
    for number, paths in enumerate(sources):
        if not is_token_file(paths[0]):
            parts.append(prepare(paths))
            continue
        if measured_apart:
            raise ConfigError("--held-out is for text and records; the validation part of .idx files is --corpus.split")
        taken = None if len(sources) > 1 else wanted
        if weights is not None:
            taken = math.ceil(math.ceil(wanted * weights[number]) * _SURPLUS)
        parts.append(_token_data(paths[0], taken, tokenizer, settings))
    if len(sources) == 1 and weights is None:
        return parts[0]
    return _blended([name for (name,) in sources], parts, weights, wanted, measured_apart)


def _blended(
    names: Sequence[str], parts: Sequence[TaskData], weights: Sequence[float] | None, wanted: int, measured_apart: bool
) -> TaskData:
    """Blend sources; without weights, in proportion to their samples. The sources have one held-out set or each one."""
    total = sum(len(part.train) for part in parts)
    if weights is None and wanted > total:
        raise ConfigError(
            f"the run takes {wanted} samples, and its token files have {total}; give weights to repeat them, such as "
            "0.7 a.idx 0.3 b.idx"
        )
    shares = weights or [len(part.train) / total for part in parts]
    (sources, numbers), notes = with_cache(
        lambda cache: cached_arrays(
            cache,
            ("sources", "numbers"),
            f"{shares} {wanted}".encode(),
            [(wanted,)] * 2,
            lambda: blend_order(shares, wanted),
        )
    )
    identity = {name: value for part in parts for name, value in part.identity.items()}
    lines = []
    for number, (name, share, part) in enumerate(zip(names, shares, parts, strict=True)):
        # The name of a file, without its folder: data may move.
        identity[f"SHA-256 of source {number + 1} ({Path(name).name})"] = part.sha256
        identity[f"share of source {number + 1}"] = share
        lines.append(f"{share:.4g} {part.name}: taken {(sources == number).sum() / part.epoch_size:.2f} times")
    measured = parts[:1] if measured_apart else parts
    texts, nats = [part.held_out_bytes for part in measured], [part.bits_per_nat for part in parts]
    return TaskData(
        f"blend of {counted(len(parts), 'source')}",
        digest_of([part.sha256 for part in parts]),
        parts[0].tokenizer,
        BlendedRows([part.train for part in parts], (sources, numbers)),
        HeldOut(BlendedRows([part.held_out.rows for part in measured])),
        tuple(dict.fromkeys([*(note for part in parts for note in part.notes), *notes])),
        identity,
        b"".join(texts) if all(texts) else b"",
        1 / sum(share / each for share, each in zip(shares, nats, strict=True)) if all(nats) else 0.0,
        digest_of([part.held_out_sha256 for part in measured]),
        tuple(lines),
        keys=(np.concatenate([part.keys[0] for part in parts]), np.concatenate([part.keys[1] for part in measured])),
    )


def _token_data(path: str, wanted: int | None, tokenizer: Tokenizer, settings: RunSettings) -> TaskData:
    """Return the rows of a pair of token files: at least ``wanted`` to train on, or those of one pass."""
    corpus, s, seed = settings.corpus, settings.sequence_length, settings.training.seed
    source = IndexedTokens(path)
    if source.dtype.kind == "f":
        raise ConfigError(f"{path!r} has values in {source.dtype}, which are no token ids; give a file of integers")
    fraction = max(corpus.held_out_fraction, 1 / max(2, len(source)))
    bounds = split_bounds(corpus.split or f"{1 - fraction},{fraction}")
    of_train, of_measured = (documents_of(each, len(source)) for each in bounds[:2])

    def build(cache: Path | None) -> tuple[GPTSamples, GPTSamples]:
        train = GPTSamples.build(source, of_train, s, wanted, seed, cache=cache)
        return train, GPTSamples.build(source, of_measured, s, None, seed, keeps_partial=True, cache=cache)

    name = f"{Path(path).name}, {counted(len(source), 'sequence')}, {counted(source.num_tokens, 'token')}"
    (train, measured), notes = with_cache(build)
    if not len(train) or not len(measured):
        raise ConfigError(
            f"{name}: {len(train)} samples of {s} tokens to train on and {len(measured)} to measure on; change "
            "--corpus.split (parts of whole sequences), lower the sequence length, or give more"
        )
    tokens = int(source.sequence_lengths[of_train].sum(dtype="int64"))
    counts, one = SampleCounts.of(tokens, s, wanted), SampleCounts.of(tokens, s, None).num_samples
    held_out = GPTRows(
        measured, tokenizer.vocab_size, tokenizer.eos_id, _EVALUATED_BATCHES * settings.training.global_batch_size
    )
    texts = [held_out.row(index)["tokens"].tolist() for index in range(min(len(held_out), -(-_DECODED_TOKENS // s)))]
    per_token = max(1, sum(len(tokenizer.decode(text).encode()) for text in texts)) / sum(map(len, texts))
    held_out.num_bytes = round(per_token * int(held_out.labels.sum()))
    return TaskData(
        name,
        source.sha256,
        tokenizer,
        GPTRows(train, tokenizer.vocab_size, tokenizer.eos_id),
        HeldOut(held_out),
        notes,
        # The order of samples depends on these numbers.
        {f"passes of {Path(path).name}": list(vars(counts).values()), "corpus.split": corpus.split},
        bits_per_nat=1 / per_token / math.log(2),
        held_out_sha256=source.sha256,
        blend=() if wanted is None else (f"taken {wanted / one:.2f} times",),
        epoch_size=one,
    )
