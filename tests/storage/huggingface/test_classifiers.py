"""Classification heads: transformers' logits, loss and gradients at every layout; in and out of its folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, gather_shards
from hf_references import CLASSIFIERS, Reference, groups_of, layouts
from safetensors.torch import load_file
from test_parity_with_transformers import ClassifierStep, check

from shardwise.core.errors import CheckpointError, ConfigError, ShardingError, VocabularyError
from shardwise.storage.huggingface import describe_model, load_pretrained, read_config, save_pretrained

NAMES = [
    name if name in ("llama", "llama_tokens", "bert", "bert_tokens") else pytest.param(name, marks=pytest.mark.slow)
    for name in CLASSIFIERS
]


@pytest.mark.sample(20)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("classifier", NAMES, indirect=True)
def test_logits_loss_gradients_and_export(group: dist.ProcessGroup, classifier: Reference, tmp_path: Path) -> None:
    for tp, pp in layouts(group.size()):
        split = group.size() == 2 and pp == 1
        check(classifier, classifier.values(), tp, pp, sequence_parallel=split, kind=ClassifierStep)
    folder = tmp_path / "exported"
    save_pretrained(load_pretrained(classifier.folder, groups=groups_of(tp, pp)), folder, source=classifier.folder)
    tensors = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    assert tensors.keys() == classifier.weights().keys()
    for name, tensor in classifier.weights().items():
        assert_bit_equal(tensors[name], tensor, name=name)
    written, config = (json.loads((each / "config.json").read_text()) for each in (classifier.folder, folder))
    for values in (written, config):
        values.pop("dtype", None), values.pop("torch_dtype", None)
    assert config == written


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("reference", ["llama_tied", "bert", "bert_masked_lm"], indirect=True)
def test_a_new_head_starts_alike_at_every_layout(
    group: dist.ProcessGroup, reference: Reference, tmp_path: Path
) -> None:
    for task in ("sequence-classification", "token-classification"):
        source = read_config(reference.folder).architecture.classifier_of(task)
        head = source.head(4, pad_token_id=7)
        found = []
        for tp, pp in layouts(group.size()):
            torch.manual_seed(5)
            model = load_pretrained(reference.folder, groups=groups_of(tp, pp), classification=head)
            state = model.sharded_state_dict()
            found.append({key: gather_shards(each.data, each.layout, model.tp_group) for key, each in state.items()})
            assert ("classifier.weight" in state) == model.post_process
            if model.post_process:
                assert model.classifier.weight.std() > 0.005
        expected = found[0]
        for other in found[1:]:
            for key, value in other.items():
                assert_bit_equal(value, expected[key], name=key)
        if group.size() == 1:
            folder = tmp_path / task
            save_pretrained(model, folder, source=reference.folder)
            again = load_pretrained(folder, groups=groups_of(1, 1))
            assert describe_model(again) == describe_model(model)
            for key, param in again.state_dict().items():
                assert_bit_equal(param, model.state_dict()[key], name=key)


def with_config(reference: Reference, folder: Path, **changes: object) -> Path:
    """A copy of the reference's folder whose config.json says otherwise."""
    shutil.copytree(reference.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.ranks(1)
@pytest.mark.parametrize("classifier", ["llama"], indirect=True)
def test_impossible_heads_and_labels_are_refused(
    group: dist.ProcessGroup, classifier: Reference, tmp_path: Path
) -> None:
    groups = groups_of(1, 1)
    for name, (changes, error, said) in enumerate(
        [
            ({"num_labels": 4}, ConfigError, "num_labels is 4; it must be the number of labels in id2label, 3"),
            ({"id2label": {"0": "A", "2": "B"}}, ConfigError, r"id2label is .* names each label"),
            ({"problem_type": "guess"}, ConfigError, 'problem_type is "guess"; it must be null or one of regression'),
            ({"id2label": {"0": "A", "1": "B"}}, CheckpointError, r"'score.weight' .* has shape \[3, 24\]"),
            ({"architectures": ["LlamaForCausalLM"]}, CheckpointError, "'lm_head.weight'"),
        ]
    ):
        with pytest.raises(error, match=said):
            load_pretrained(with_config(classifier, tmp_path / str(name), **changes), groups=groups)
    model = load_pretrained(classifier.folder, groups=groups)
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(VocabularyError, match=r"label 3 at position \[0\] is outside the 3 labels"):
        model(ids, labels=torch.tensor([3, 0]))
    with pytest.raises(ShardingError, match=r"labels have shape \[2, 3\]; .* with 3 labels .* must have \[2\]"):
        model(ids, labels=torch.ones(2, 3, dtype=torch.long))
    without = load_pretrained(with_config(classifier, tmp_path / "unpadded", pad_token_id=None), groups=groups)
    with pytest.raises(ConfigError, match="a batch of 2 sequences needs padding, and the model has no pad_token_id"):
        without(ids)
    assert without(ids[:1]).shape == (1, 3)
