"""``BertModel``: hidden states are those of transformers at any layout, and a folder of it is written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_close_to
from hf_references import groups_of, layouts

from shardwise.core.errors import ConfigError
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface import load_pretrained, save_pretrained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=101, hidden_size=24, intermediate_size=37, num_hidden_layers=3, num_attention_heads=6
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.ranks(2)
def test_hidden_states(group: dist.ProcessGroup, folder: Path) -> None:
    import transformers

    theirs = transformers.BertModel.from_pretrained(folder).eval()
    ids, mask = torch.arange(14).view(2, 7) + 40, torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).last_hidden_state
    for tp, pp in layouts(group.size()):
        model = load_pretrained(folder, groups=groups_of(tp, pp)).eval()
        assert isinstance(model, Bert)
        assert not any(name.startswith(("output_layer", "lm_head", "pooler")) for name, _ in model.named_parameters())
        with torch.no_grad():
            if pp > 1 and not model.pre_process:
                hidden = torch.empty(7, 2, 24)
                dist.recv(hidden, 0)
                model.set_input_tensor(hidden)
            output = model(ids, mask)
            assert isinstance(output, torch.Tensor)
            if pp > 1 and model.pre_process:
                dist.send(output, 1)
                continue
        real = mask.bool()
        assert_close_to(output.transpose(0, 1)[real], expected[real], rtol_of_norm=2e-5, name=f"tp {tp}, pp {pp}")
        if pp == 1:
            save_pretrained(model, folder.parent / "again", source=folder)
            again = transformers.BertModel.from_pretrained(
                folder.parent / "again", add_pooling_layer=False
            ).state_dict()
            for name, value in again.items():
                assert torch.equal(value, theirs.state_dict()[name]), name


def test_a_last_norm_needs_a_head() -> None:
    with pytest.raises(ConfigError, match="a model without heads has no last norm"):
        Bert(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2), 8, 8, groups=None, add_lm_head=False)  # type: ignore[arg-type]
