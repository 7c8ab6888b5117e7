"""Indexed data: files and samples are those of Megatron's classes, and what is wrong in a file is said.

``indexed/make_samples.py`` made the files of ``indexed/`` with Megatron.
"""

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.gpt_samples import GPTRows, GPTSamples
from shardwise.data.indexed import DTYPES, IndexedTokens, IndexedWriter
from shardwise.megatron import datasets

HERE = Path(__file__).parent / "indexed"
SPEC = importlib.util.spec_from_file_location("make_samples", HERE / "make_samples.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
EXPECTED = json.loads((HERE / "megatron_samples.json").read_text())


class Numbers:
    vocab_size, eod, pad = 300, 299, -1


def write(folder, name, documents, dtype=np.uint16):
    with IndexedWriter(folder / f"{name}.bin", dtype) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
        writer.finish(folder / f"{name}.idx")
    return folder / name


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    for name in reference.LENGTHS:
        reference.build(folder, name, datasets)
    return folder


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("what", EXPECTED)
def test_samples_and_their_order_are_megatrons(what, cached, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    settings = dict(reference.SETTINGS[what])
    sizes, blend = settings.pop("sizes"), [*settings.pop("blend", ["a"])]
    masks = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": True}
    settings |= {"create_attention_mask": False, "path_to_cache": str(tmp_path / "cache")} | masks
    for _ in range(1 + cached):
        config = datasets.GPTDatasetConfig(blend=datasets.get_blend_from_list(blend), tokenizer=Numbers(), **settings)
        builder = datasets.BlendedMegatronDatasetBuilder(datasets.GPTDataset, sizes, lambda: True, config)
        found = builder.build()
    assert [None if split is None else reference.summary(split) for split in found] == EXPECTED[what]
    assert len(list((tmp_path / "cache").glob("*-document_index.npy"))) == sum(
        len(getattr(split, "datasets", [split])) for split in found
    )


def test_each_split_may_have_its_own_blend(files, monkeypatch):
    monkeypatch.chdir(files)
    masks = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    config = datasets.GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend_per_split=[(["a", "b"], [1.0, 3.0]), (["b", "c"], None), None],
        multiple_validation_sets=True,
        tokenizer=Numbers(),
        **masks,
    )
    train, (b, c), test = datasets.BlendedMegatronDatasetBuilder(
        datasets.GPTDataset, (40, None, None), lambda: True, config
    ).build()
    assert (len(train), (train.dataset_index == 0).sum(), test) == (40, 10, None)
    assert (b.dataset_path, c.dataset_path) == ("b", "c")
    assert train[3]["dataset_id"] in (0, 1)


def test_files_of_megatron_are_read_and_the_same_bytes_written(tmp_path):
    given = IndexedTokens(HERE / "small")
    assert [given.get(number).tolist() for number in range(len(given))] == [
        [0, 1, 2, 3, 4], [70_000], [3, 4, 5, 6], [], [7, 8, 9]
    ]  # fmt: skip
    assert (given.get(0, 1, 3).tolist(), given.get(2, 3).tolist()) == ([1, 2, 3], [6])
    assert given.document_indices.tolist() == [0, 2, 5, 5]
    writer = IndexedWriter(tmp_path / "whole.bin", given.dtype)
    writer.append(HERE / "small")
    writer.finish(tmp_path / "whole.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"whole.{suffix}").read_bytes() == (HERE / f"small.{suffix}").read_bytes()
    assert IndexedTokens(tmp_path / "whole.idx").sha256 == given.sha256
    dataset = datasets.IndexedDataset(str(HERE / "small"))
    assert [each.tolist() for each in dataset[3:]] == [[], [7, 8, 9]]
    assert (dataset[-1].tolist(), datasets.IndexedDataset.exists(str(HERE / "none"))) == ([7, 8, 9], False)
    # As Megatron's program that merges files.
    builder = datasets.IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=dataset.index.dtype)
    for _ in range(2):
        builder.add_index(str(HERE / "small"))
    builder.finalize(str(tmp_path / "merged.idx"))
    merged = datasets.IndexedDataset(str(tmp_path / "merged"))
    assert [each.tolist() for each in merged[:]] == [each.tolist() for each in dataset[:]] * 2
    lengths, documents = dataset.index.sequence_lengths.tolist(), dataset.index.document_indices.tolist()
    assert merged.index.sequence_lengths.tolist() == lengths * 2
    assert merged.index.document_indices.tolist() == documents + [documents[-1] + each for each in documents[1:]]
    assert merged.index.sequence_pointers[len(dataset)] == (HERE / "small.bin").stat().st_size


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_comes_back(dtype, tmp_path):
    tokens = np.array([0, 1, 127], dtype=dtype)
    found = IndexedTokens(write(tmp_path, "all", [tokens, tokens[:1]], dtype))
    assert found.dtype == dtype
    assert found.get(0).tolist() == tokens.tolist()


TORN = {
    "MMIDIDX": lambda idx: b"PK" + idx[2:],
    "its version is 2": lambda idx: idx[:9] + struct.pack("<Q", 2) + idx[17:],
    "dtype has the code 9": lambda idx: idx[:17] + b"\x09" + idx[18:],
    "lists 5 sequences and 4 document boundaries, which take 126 bytes, and it has 125": lambda idx: idx[:-1],
    "multimodal": lambda idx: idx + bytes(5),
    "lists 9223372036854775808 sequences": lambda idx: idx[:18] + struct.pack("<Q", 1 << 63) + idx[26:],
    "sequence 1 has 1 tokens from byte 52": lambda idx: idx[:62] + struct.pack("<q", 52) + idx[70:],
    "sequence 0 has -5 tokens": lambda idx: idx[:34] + struct.pack("<i", -5) + idx[38:],
    "its sequences end at byte 40": lambda idx: idx[:50] + struct.pack("<i", 0) + idx[54:],
    "document boundaries do not rise from 0 to its 5": lambda idx: idx[:-8] + struct.pack("<q", 4),
}


@pytest.mark.parametrize("what", TORN)
def test_a_torn_or_foreign_index_is_refused(what, tmp_path):
    (tmp_path / "x.bin").write_bytes((HERE / "small.bin").read_bytes())
    (tmp_path / "x.idx").write_bytes(TORN[what]((HERE / "small.idx").read_bytes()))
    with pytest.raises(DataError, match=what):
        IndexedTokens(tmp_path / "x")


def test_other_bad_files_are_refused(tmp_path):
    (tmp_path / "x.idx").write_bytes((HERE / "small.idx").read_bytes())
    with pytest.raises(DataError, match=r"x.bin': No such file.*NAME.idx and NAME.bin"):
        IndexedTokens(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is empty; it holds no tokens"):
        IndexedTokens(tmp_path / "x")
    with pytest.raises(DataError, match="tokens from 7 to 70000 do not fit uint16"):
        write(tmp_path, "y", [[7, 70_000]])
    with pytest.raises(ConfigError, match="no code for dtype uint32"):
        IndexedWriter(tmp_path / "y.bin", np.uint32)
    with (
        IndexedWriter(tmp_path / "y.bin", np.uint16) as writer,
        pytest.raises(ConfigError, match="has tokens in int32, and these files are in uint16"),
    ):
        writer.append(HERE / "small")


def test_rows_follow_the_samples_and_refuse_ids_over_the_vocabulary(files):
    source = IndexedTokens(files / "a")
    samples = GPTSamples.build(source, np.arange(60, dtype=np.int32), 16, None, 3, keeps_partial=True)
    rows = GPTRows(samples, 300, 0)
    assert rows.schedule(4, 9).global_batch(2).tolist() == [8, 9, 10, 11]
    assert rows.labels.sum() == source.num_tokens - 1
    last = int(np.flatnonzero(samples.shuffle_index == len(rows) - 1)[0])
    row = rows.row(last)
    assert (row["labels"] != -100).sum() == rows.lengths[last] < 16
    assert row["tokens"][1] == row["labels"][0]
    with pytest.raises(DataError, match=r"a.bin has the token 2\d\d, and the vocabulary has ids from 0 to 199"):
        [GPTRows(samples, 200, 0).row(index) for index in range(len(samples))]


@pytest.mark.slow
def test_a_file_larger_than_memory_takes_little_of_it(tmp_path):
    lengths = np.full(1 << 20, 2560, dtype=np.int32)
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(len(lengths) * 2560 * 4)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(lengths) + 1)
    arrays = lengths, np.arange(len(lengths)) * 2560 * 4, np.arange(len(lengths) + 1)
    (tmp_path / "x.idx").write_bytes(header + b"".join(each.tobytes() for each in arrays))
    code = f"""
import numpy as np
from shardwise.data.gpt_samples import GPTRows, GPTSamples
from shardwise.data.indexed import IndexedTokens
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1000
before = resident()
source = IndexedTokens({str(tmp_path / "x")!r})
rows = GPTRows(GPTSamples.build(source, np.arange(len(source), dtype=np.int32), 2048, None, 1), 9, 0)
most = 0
for index in range(0, len(rows), 97):
    assert not rows.row(index)["tokens"].any()
    if index % 2000 < 97:
        most = max(most, resident())
print(most - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 300
