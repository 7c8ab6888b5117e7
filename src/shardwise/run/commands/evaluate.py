"""Evaluate a model on data."""

import math
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Annotated, Literal

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import DivergenceError
from shardwise.data import ExampleEncoder, HeldOut, SampleRows, TokenStream, WindowRows, example_of, read_by_form
from shardwise.data.examples import has_text, is_plain_text
from shardwise.data.json_records import counted
from shardwise.data.reading import corpus_of
from shardwise.models.generation.cache import CausalModel
from shardwise.run.commands.opened_model import Evaluation, as_tuple, same_checkpoint
from shardwise.run.commands.text_generation import open_causal
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.settings import CorpusSettings, TrackerName
from shardwise.run.tasks.samples import NO_RECORDS, encode_examples, left_out_notes
from shardwise.run.tasks.texts import STDLIB, read_data
from shardwise.run.tracking import track_evaluation
from shardwise.training.bounds import (
    BATCH,
    DEFAULT_BATCH,
    DEFAULT_TIMEOUT,
    SEQUENCE,
    TIMEOUT,
    checks_arguments,
    require,
)
from shardwise.training.objective import CrossEntropy, measure


@checks_arguments
def evaluate(
    checkpoint: str | PathLike[str],
    data: str | Sequence[str],
    *,
    adapter: str | PathLike[str] | None = None,
    sequence_length: Annotated[int | None, SEQUENCE] = None,
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH,
    mask_prompts: bool = True,
    special_tokens: bool = True,
    text_key: str = CorpusSettings.text_key,
    prompt_template: str | PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    track: Sequence[TrackerName] = (),
) -> Evaluation:
    """Evaluate a model on data; every rank calls.

    Args:
        checkpoint: folder of one checkpoint; folder of a run or an import, whose newest checkpoint is taken; Hugging
            Face folder; or folder of adapters that names its base model.
        data: files and folders, in the formats that ``finetune`` reads.
        adapter: folder of adapters to apply to the model.
        sequence_length: tokens per window; if None, 512 or the model's maximum, whichever is less. A longer text is cut
            into windows, a longer chat is split.
        batch_size: windows per batch.
        mask_prompts: measure only completions and the turns of the assistant instead of all tokens.
        special_tokens: parse the names of special tokens in texts as special tokens.
        text_key: field of a record that has the text.
        prompt_template: file with a form for records of other keys; see ``shardwise.data.record_forms``.
        device: device of the model; "auto" takes a GPU if every rank can have one.
        timeout: maximum wait for another rank, in seconds.
        track: experiment trackers that get the metrics.

    Returns:
        The metrics, on every rank.

    Raises:
        ConfigError: an argument is out of range, the model cannot be split over this many ranks, or it does not
            continue texts.
        CheckpointError: the model is missing or damaged.
        DataError: the tokenizer is missing, or the data cannot be read or has no token to measure.
        DivergenceError: the loss is not finite.
    """
    files = as_tuple(data)
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        opened, tokenizer = agree(lambda: open_causal(checkpoint, adapter, ranks.world_size), group=ranks.control)

        def read() -> tuple[str, HeldOut, list[str]]:
            length = opened.sequence_length(sequence_length)
            if STDLIB in files:
                require(prompt_template is None, NO_RECORDS)
                corpus = read_data(files)
            else:
                name, records = read_by_form(files, prompt_template, partial(has_text, text_key=text_key))
                if not all(is_plain_text(record, text_key) for record in records):
                    template = opened.chat_template()
                    encoder = ExampleEncoder(
                        tokenizer, template, mask_prompts=mask_prompts, parse_special=special_tokens
                    )
                    examples = [example_of(record, text_key) for record in records]
                    samples, left_out = encode_examples(examples, encoder, name)
                    rows = SampleRows(samples, length, packing=True, too_long="split")
                    notes = left_out_notes(examples, left_out, "to measure on")
                    return f"{name}, {counted(len(samples), 'sample')}", HeldOut(rows), notes
                corpus = corpus_of(name, records, text_key)
            stream = TokenStream.from_corpus(corpus, tokenizer, parse_special=special_tokens)
            return corpus.name, HeldOut(WindowRows(stream, length)), []

        with ranks.phase("reading the data"):
            name, held_out, notes = agree(read, group=ranks.control)
            num_labels, num_bytes = held_out.num_labels, held_out.rows.num_bytes
            check_same((name, num_labels, num_bytes), "the data", group=ranks.control)
        model = opened.load_model(ranks)
        assert isinstance(model, CausalModel)
        with ranks.phase("measuring", limited=True):
            (nats,) = measure(model, CrossEntropy(), held_out, batch_size)
        if not math.isfinite(nats):
            raise DivergenceError(f"the loss on {name} is {nats}: the model's weights have diverged")
        loss = nats / num_labels
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits per byte": held_out.bits_per_byte(nats)}
        if ranks.is_first:
            settings = {"data": as_tuple(data), "sequence_length": opened.sequence_length(sequence_length)}
            track_evaluation(track, checkpoint, settings, metrics)
        size = f"{num_labels:,} tokens, {num_bytes:,} bytes"
        return Evaluation(f"{name}: {size}", metrics, tuple(notes))
