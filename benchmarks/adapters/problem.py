"""The input of every variant: a Llama-like model and adapters in files, and samples with masked prompts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from steps.problem import LlamaSizes
from torch import Tensor

from shardwise.core.errors import ConfigError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IGNORED = -100


@dataclass(frozen=True)
class FinetuneSizes(LlamaSizes):
    """Sizes of a model, its adapters and its batch.

    Attributes:
        num_groups: number of key-value heads.
        lora_rank: rank of the adapters on every linear layer of the transformer layers.
        prompt_length: number of masked tokens at the start of a sample.
    """

    num_groups: int = 4
    lora_rank: int = 16
    prompt_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_length >= self.sequence_length:
            raise ConfigError(
                f"prompt_length {self.prompt_length} leaves nothing to learn of {self.sequence_length} tokens"
            )
        if self.num_heads % self.num_groups != 0:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}")

    def check_split(self, num_ranks: int) -> None:
        super().check_split(num_ranks)
        if self.num_groups % num_ranks != 0:
            raise ConfigError(f"num_groups {self.num_groups} is not a multiple of the {num_ranks} ranks")


@dataclass(frozen=True)
class Files:
    """Folders of the model and of the adapters.

    Attributes:
        model: Hugging Face folder of the model.
        adapter: folder of adapters in the format of peft.
    """

    model: Path
    adapter: Path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars and deprecation warnings of transformers during the block."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_files(sizes: FinetuneSizes, folder: Path, seed: int) -> Files:
    """Write random weights, and adapters with a product that is not 0, so that an error in either factor shows."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_groups,
        intermediate_size=sizes.ffn_hidden_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.sequence_length,
        tie_word_embeddings=sizes.tie_embeddings,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    files = Files(folder / "model", folder / "adapter")
    lora = peft.LoraConfig(
        r=sizes.lora_rank,
        lora_alpha=2 * sizes.lora_rank,
        target_modules=list(TARGETS),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    with quiet():
        model.save_pretrained(files.model)
        adapted = peft.get_peft_model(model, lora)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(files.adapter)
    return files


def draw_batch(sizes: FinetuneSizes, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ids ``[b, s]`` and labels, which are the next ids, or ``IGNORED`` in the prompt; the same in every step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.sequence_length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, : sizes.prompt_length] = IGNORED
    return tokens[:, :-1].contiguous(), labels
