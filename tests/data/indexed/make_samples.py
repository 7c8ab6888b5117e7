"""Makes ``megatron_samples.json`` and the fixtures ``small.bin`` and ``small.idx`` with Megatron's own classes.

    pip install --no-deps --target REFERENCE megatron-core==0.16.1
    PYTHONPATH=REFERENCE python tests/data/indexed/make_samples.py

Tests do not need Megatron: they compare with the files that this script leaves in its folder.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
SETTINGS = {
    "one epoch": {"sizes": [None, None, None], "sequence_length": 16, "random_seed": 1, "split": "8,1,1"},
    "several epochs": {"sizes": [100, 7, None], "sequence_length": 31, "random_seed": 1234, "split": "969,30,1"},
    "an end apart": {"sizes": [40, 5, 3], "sequence_length": 64, "random_seed": 7, "split": "60,30,10"},
    "a partial sample": {
        "sizes": [20, None, None],
        "sequence_length": 24,
        "random_seed": 3,
        "split": "1,1,1",
        "drop_last_partial_validation_sequence": False,
        "add_extra_token_to_sequence": False,
    },
    "a weighted blend": {
        "sizes": [90, 20, 10],
        "sequence_length": 16,
        "random_seed": 11,
        "split": "90,8,2",
        "blend": ["0.5", "a", "0.2", "b", "0.3", "c"],
    },
    "a blend by size": {
        "sizes": [None, 9, None],
        "sequence_length": 8,
        "random_seed": 5,
        "split": "6,3,1",
        "blend": "abc",
    },
}
LENGTHS = {"a": (60, 40), "b": (30, 90), "c": (25, 17)}


def documents_of(name: str) -> list[np.ndarray]:
    """Return the documents of a file: random tokens of 300 ids, some documents empty, the last id at each end."""
    random = np.random.default_rng(ord(name))
    count, longest = LENGTHS[name]
    lengths = random.integers(0, longest, count)
    return [np.append(random.integers(0, 299, length), 299)[: max(0, length)] for length in lengths]


def build(folder: Path, name: str, indexed) -> None:
    """Write the files of ``documents_of`` with Megatron's builder."""
    builder = indexed.IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
    for document in documents_of(name):
        builder.add_item(torch.from_numpy(document.astype(np.int64)))
        builder.end_document()
    builder.finalize(f"{folder / name}.idx")


def summary(samples) -> dict:
    """Return the first token of each sample, and a digest of all tokens, labels and masks in order."""
    digest = hashlib.sha256()
    for number in range(len(samples)):
        for name in ("tokens", "labels", "loss_mask"):
            digest.update(samples[number][name].long().numpy().astype("<i8").tobytes())
    return {
        "first": [int(samples[number]["tokens"][0]) for number in range(len(samples))],
        "sha256": digest.hexdigest(),
    }


def main() -> None:
    from megatron.core.datasets import indexed_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    class Tokenizer:
        vocab_size, eod, pad = 300, 299, -1
        unique_identifiers = ("Tokenizer",)

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in LENGTHS:
            build(Path(folder), name, indexed_dataset)
        for what, settings in SETTINGS.items():
            settings = dict(settings)
            sizes, blend = settings.pop("sizes"), [*settings.pop("blend", ["a"])]
            masks = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": True}
            config = GPTDatasetConfig(
                blend=get_blend_from_list(blend),
                tokenizer=Tokenizer(),
                create_attention_mask=False,
                **masks,
                **settings,
            )
            datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
            found[what] = [None if split is None else summary(split) for split in datasets]
    with open(HERE / "megatron_samples.json", "w") as file:
        json.dump(found, file, separators=(",", ":"))
    builder = indexed_dataset.IndexedDatasetBuilder(f"{HERE / 'small'}.bin", dtype=np.int32)
    builder.add_item(torch.arange(5))
    builder.add_item(torch.tensor([70_000]))
    builder.end_document()
    builder.add_document(torch.arange(3, 10), [4, 0, 3])
    builder.end_document()
    builder.finalize(f"{HERE / 'small'}.idx")


if __name__ == "__main__":
    sys.exit(main())
