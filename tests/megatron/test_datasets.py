"""The mock dataset's samples are those of Megatron, and say what its config asks for."""

import pytest
import torch

from shardwise.core.errors import ConfigError
from shardwise.megatron.datasets import BlendedMegatronDatasetBuilder, GPTDatasetConfig, MockGPTDataset, compile_helpers
from shardwise.megatron.tokenizers import MegatronTokenizer, NullTokenizer


def build(sizes=(100, 10, None), cls=MockGPTDataset, **settings):
    compile_helpers()
    options = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    options |= {"sequence_length": 3000, "tokenizer": NullTokenizer(64)}
    config = GPTDatasetConfig(random_seed=3, **(options | settings))
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


class FewDocuments(MockGPTDataset):
    """Three documents for each split, of which many samples need many passes."""

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        documents = MockGPTDataset.build_low_level_dataset(dataset_path, config)
        documents.sequence_lengths = documents.sequence_lengths[:9] % 50 + 2
        documents.size = 9
        return documents


def test_samples_are_documents_one_after_the_other():
    train, valid, test = build()
    # These numbers, and the sums below, are Megatron's own.
    assert [len(split) for split in (train, valid, test)] == [22730, 22719, 22762]
    for split in (train, valid, test):
        sample = split[5]
        tokens, labels = sample["tokens"], sample["labels"]
        assert torch.equal(tokens[1:], labels[:-1])
        # A document counts up, and 63 ends it, or is counted.
        assert ((labels == (tokens + 1) % 64) | (labels == 63) | ((tokens == 63) & (labels == 1))).all()
        assert torch.equal(sample["position_ids"], torch.arange(3000))
        assert torch.equal(sample["attention_mask"][0], torch.ones(3000, 3000, dtype=torch.bool).triu(1))
        assert sample["loss_mask"].all()
        assert not split[None]["loss_mask"].any()
    assert [int(train[index]["tokens"][:100].sum()) for index in range(3)] == [3626, 2845, 2790]


def test_documents_are_kept_apart_where_asked():
    plain, apart = (
        build(reset_position_ids=reset, reset_attention_mask=reset, eod_mask_loss=reset)[0][0]
        for reset in (False, True)
    )
    tokens = apart["tokens"]
    assert torch.equal(tokens, plain["tokens"])
    ends = (tokens == 63).nonzero().flatten().tolist()
    assert len(ends) > 10
    begins = [0, *(end + 1 for end in ends)]
    for begin, end in zip(begins, [*begins[1:], 3000], strict=True):
        assert torch.equal(apart["position_ids"][begin:end], torch.arange(end - begin))
        assert not apart["attention_mask"][0, begin:end, begin:end].tril().any()
        assert apart["attention_mask"][0, begin:end, :begin].all()
    assert torch.equal(apart["loss_mask"] == 0, tokens == 63)


@pytest.mark.parametrize("extra", [True, False])
def test_as_many_passes_as_are_needed(extra):
    train, _, test = build((40, None, None), FewDocuments, add_extra_token_to_sequence=extra)
    per_pass = int(train.dataset.sequence_lengths[train.indices].sum())
    assert len(train) == (-(-(40 * 3000 + extra) // per_pass) * per_pass - extra) // 3000 >= 40
    assert sorted(train.shuffle_index.tolist()) == list(range(len(train)))
    # A pass of three documents is shorter than a sample.
    assert len(test) == 0
    if not extra:
        sample = train[0]
        assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
        assert sample["loss_mask"][-1] == 0


@pytest.mark.parametrize("extra", [True, False])
def test_the_last_tokens_of_validation_are_a_padded_sample_where_asked(extra):
    settings = {"add_extra_token_to_sequence": extra, "sequence_length": 23, "eod_mask_loss": True}
    settings |= {"tokenizer": NullTokenizer(64, pad_id=7)}
    dropped, kept = (
        build((None, None, None), FewDocuments, drop_last_partial_validation_sequence=drops, **settings)
        for drops in (True, False)
    )
    assert [len(kept[split]) - len(dropped[split]) for split in (0, 1, 2)] == [0, 1, 0]
    valid = kept[1]
    # Of 23 tokens, and one more to predict where that is a token.
    rest = int(valid.dataset.sequence_lengths[valid.indices].sum()) - extra - 23 * len(dropped[1])
    assert 0 < rest < 23
    assert sorted(valid.shuffle_index.tolist()) == list(range(len(valid)))
    sample = valid[valid.shuffle_index.tolist().index(len(valid) - 1)]
    learned = rest if extra else rest - 1
    # Padding is no token; nor is 7 learned, which counts as padding in a document too, as in Megatron.
    assert sample["tokens"][rest + extra :].eq(0).all()
    assert sample["labels"][learned:].eq(0).all()
    assert sample["loss_mask"][learned:].eq(0).all()
    # The documents end with the end of one.
    assert sample["labels"][learned - 1] == 63
    assert sample["loss_mask"][learned - 1] == 1
    whole = [index for index in range(len(valid)) if valid.shuffle_index[index] < len(dropped[1])]
    assert {len(valid[index]["tokens"]) for index in whole} == {23}


def test_what_is_wrong_is_said():
    with pytest.raises(ConfigError, match="blend needs split"):
        build(blend=(["data"], None))
    with pytest.raises(ConfigError, match="the blend of 2 names has 1 weights"):
        build(blend=(["a", "b"], [1.0]), split="1,1,1")
    with pytest.raises(ConfigError, match="blend_per_split has 1 blends"):
        build(blend_per_split=[(["a"], None)])
    with pytest.raises(ConfigError, match="GPTDatasetConfig needs eod_mask_loss"):
        build(eod_mask_loss=None)
    with pytest.raises(ConfigError, match=r"sizes are \[1\]; give one for each of train, valid, test"):
        build((1,))
    with pytest.raises(ConfigError, match=r"metadata_path=None and metdata_path, vocab_size; .*'null-text'"):
        MegatronTokenizer.from_pretrained(metdata_path={"library": "null-text"}, vocab_size=64)
    with pytest.raises(ConfigError, match="the null tokenizer needs vocab_size"):
        MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"})
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=64)
    assert (tokenizer.eod, tokenizer.tokenize("3 14"), tokenizer.detokenize([3, 14])) == (63, [3, 14], "3 14")
    with pytest.raises(ConfigError, match="numbers divided by spaces"):
        tokenizer.tokenize("three")
