"""The examples of docs/huggingface.md and docs/finetuning.md run, and leave what other libraries open."""

import pytest
import torch
import torch.distributed as dist
from harness.page import run_example
from storage.adapters.tiny_models import read_adapters, save_model


@pytest.mark.ranks(2)
def test_the_examples_of_the_pages_run(group, tmp_path, monkeypatch):
    import transformers

    if group.rank() == 0:
        save_model("llama", tmp_path / "MODEL_DIR")
    dist.barrier(group=group)
    monkeypatch.chdir(tmp_path)
    assert run_example("huggingface.md", monkeypatch) == []
    assert run_example("finetuning.md", monkeypatch) == []
    dist.barrier(group=group)
    base, exported = (transformers.AutoModelForCausalLM.from_pretrained(name) for name in ("MODEL_DIR", "exported"))
    torch.testing.assert_close(exported.state_dict(), base.state_dict(), rtol=0, atol=0)
    adapted = read_adapters(base, "adapters")
    assert set(adapted.peft_config["default"].target_modules) == {"q_proj", "v_proj"}
