"""Measure a model on data: what the ranks of ``shardwise eval`` do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shardwise.cli.classifying import Opened, evaluate_labels, open_classifier
from shardwise.cli.eval import EvalArguments
from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import ConfigError, DivergenceError
from shardwise.data import (
    EvaluationSamples,
    EvaluationWindows,
    ExampleEncoder,
    SampleDataset,
    TextWindows,
    TokenStream,
    evaluation_batches,
    example_of,
    read_records,
)
from shardwise.data.examples import has_text, is_plain_text
from shardwise.data.labelled import counted
from shardwise.data.reading import corpus_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import OpenCheckpoint, open_model
from shardwise.run.commands.text_generation import open_causal
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.tasks.samples import encode_examples, left_out_notes
from shardwise.run.tasks.texts import STDLIB, read_data
from shardwise.training.objective import model_inputs

_USUAL_SEQUENCE_LENGTH = 512


@dataclass(frozen=True)
class Measure:
    """What is measured on.

    Attributes:
        name: what people call it.
        windows: of the tokens.
        num_labels: tokens whose loss counts.
        num_bytes: of their text in UTF-8.
        notes: what was left out, and why.
    """

    name: str
    windows: TextWindows
    num_labels: int
    num_bytes: int
    notes: tuple[str, ...] = ()


def open_data(arguments: EvalArguments, opened: OpenCheckpoint, tokenizer: Tokenizer) -> Measure:
    """Read and encode the data.

    Raises:
        DataError: it cannot be read, or nothing in it counts.
        ConfigError: windows longer than the model's longest.
    """
    longest, key = opened.description.max_sequence_length, arguments.text_key
    length = arguments.sequence_length or min(_USUAL_SEQUENCE_LENGTH, longest)
    if length > longest:
        raise ConfigError(f"--sequence-length {length} is more than {longest}, the longest sequence of the model")
    if STDLIB in arguments.data:
        corpus = read_data(arguments.data)
    else:
        name, records = read_records(arguments.data, has_text=partial(has_text, text_key=key))
        if not all(map(is_plain_text, records)):
            encoder = ExampleEncoder(
                tokenizer,
                opened.chat_template(),
                mask_prompts=arguments.mask_prompts,
                parse_special=arguments.special_tokens,
            )
            examples = [example_of(record, key) for record in records]
            samples, left_out = encode_examples(examples, encoder, name)
            dataset = SampleDataset(samples, length, packing=True, too_long="split")
            windows = EvaluationSamples(dataset)
            notes = tuple(left_out_notes(examples, left_out, "to measure on"))
            return Measure(
                f"{name}, {counted(len(samples), 'sample')}", windows, windows.num_labels, dataset.num_bytes, notes
            )
        corpus = corpus_of(name, records, key)
    stream = TokenStream.from_corpus(corpus, tokenizer, parse_special=arguments.special_tokens)
    return Measure(corpus.name, EvaluationWindows(stream, length), stream.num_tokens, stream.num_bytes)


def open_to_measure(arguments: EvalArguments, world_size: int) -> Opened | tuple[OpenCheckpoint, Tokenizer]:
    """The model, without its tensors: one that labels texts, or continues them. Raises as ``open_causal``."""
    where = arguments.checkpoint, arguments.adapter, world_size
    model = open_model(Path(arguments.checkpoint), None if arguments.adapter is None else Path(arguments.adapter))
    return open_causal(*where) if model.description.classification is None else open_classifier(*where)


def evaluate(arguments: EvalArguments) -> None:
    """Print what the model makes of the data; every rank calls.

    Raises:
        ShardwiseError: see ``open_causal`` and ``open_data``; the loss is not finite; on every rank.
    """
    with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:
        found = agree(lambda: open_to_measure(arguments, ranks.world_size), group=ranks.control)
        if isinstance(found, Opened):
            evaluate_labels(arguments, ranks, found)
            return
        opened, tokenizer = found
        with ranks.phase("reading the data"):
            measure = agree(lambda: open_data(arguments, opened, tokenizer), group=ranks.control)
            check_same((measure.name, measure.num_labels, measure.num_bytes), "the data", group=ranks.control)
        model = opened.load_model(ranks)
        assert isinstance(model, GPT)
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        with torch.no_grad(), ranks.phase("measuring", limited=True):
            for batch in evaluation_batches(measure.windows, arguments.batch_size):
                moved = tuple(tensor.to(ranks.device) for tensor in batch)
                total += model(**model_inputs(moved)).sum(dtype=torch.float64)
        nats = float(total)
        if not math.isfinite(nats):
            raise DivergenceError(f"the loss on {measure.name} is {nats}: the model's weights have diverged")
        if ranks.is_first:
            for note in measure.notes:
                print(f"note            {note}")
            loss = nats / measure.num_labels
            print(f"data            {measure.name}: {measure.num_labels:,} tokens, {measure.num_bytes:,} bytes")
            print(f"loss            {loss:.6f} nats per token")
            print(f"perplexity      {math.exp(min(loss, 700)):.4f}")
            print(f"bits per byte   {measure.windows.bits_per_byte(nats):.6f}")
