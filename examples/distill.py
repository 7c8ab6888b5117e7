"""Train a model on what a larger one predicts: a method of learning that Shardwise does not have, as a program.

    python examples/distill.py STUDENT --teacher LARGE --data chats.jsonl --out taught
    export OMP_NUM_THREADS=1
    torchrun --nproc-per-node 2 examples/distill.py STUDENT --teacher LARGE --data chats.jsonl --out taught --tp 2

Both models are Hugging Face folders with the same tokenizer. The loss of a token is ``alpha T² KL + (1 - alpha) CE``
(Hinton et al. 2015, arXiv:1503.02531). Ranks split the teacher as they split the student, and logits are never
gathered. Data, resuming, checkpoints and the written folder are those of ``shardwise finetune``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise import Groups
from shardwise.core.errors import ConfigError
from shardwise.data import IGNORE_INDEX, Batch
from shardwise.data.tokenizer import PaddedTokenizer
from shardwise.models import GPT
from shardwise.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_kl_div
from shardwise.run.run import run
from shardwise.run.settings import FinetuneSettings
from shardwise.run.tasks.pretrained_model import PretrainedModel, digest_of
from shardwise.run.tasks.results import write_adapters, write_model
from shardwise.run.tasks.samples import Examples
from shardwise.run.tasks.task import Task
from shardwise.run.tasks.task_data import TaskData
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.training.bounds import from_keywords
from shardwise.training.objective import CrossEntropy, Objective


@dataclass(frozen=True)
class DistillationObjective(Objective):
    """The loss of a step, given the student's logits.

    Attributes:
        teacher: teacher model, in evaluation mode and without gradients.
        group: the ranks that split both vocabularies.
        vocab_size: vocabulary size of the student; both models are split by it.
        num_shared: number of leading ids that both models have; the divergence is taken over these ids.
        alpha: weight of the divergence.
        temperature: divisor of both models' logits.
    """

    teacher: GPT
    group: ProcessGroup
    vocab_size: int
    num_shared: int
    alpha: float
    temperature: float

    shares_samples = True
    names = ("cross_entropy", "divergence")

    @property
    def depends_on_length(self) -> bool:
        return self.teacher.depends_on_length

    def inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """Leave out the labels, so that the student returns logits."""
        return super().inputs(batch) | {"labels": None}

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Sum over trained labels; the divergence is reported without ``T²``."""
        context = self.teacher.view_of(batch.labels.size(1)).context
        labels = (batch.labels if context is None else context.own(batch.labels, dim=1)).t().contiguous()
        with torch.no_grad():
            taught: Tensor = self.teacher(**self.inputs(batch))
        sizes = {"vocab_size": self.num_shared, "padded_vocab_size": self.vocab_size}
        divergence = vocab_parallel_kl_div(output, taught, temperature=self.temperature, group=self.group, **sizes)
        divergence = divergence.masked_fill(labels == IGNORE_INDEX, 0.0).sum(dtype=dtype)
        each = vocab_parallel_cross_entropy(output, labels, group=self.group, vocab_size=self.vocab_size)
        cross_entropy = each.sum(dtype=dtype)
        loss = self.alpha * self.temperature**2 * divergence + (1 - self.alpha) * cross_entropy
        return loss, torch.stack([cross_entropy.detach().double(), divergence.detach().double()])

    @property
    def for_evaluation(self) -> Objective:
        return CrossEntropy()

    def reported(self, means: Sequence[float], bits_per_nat: float) -> dict[str, float]:
        return super().reported(means, bits_per_nat) | {"bits_per_byte": means[1] * bits_per_nat}


class Teacher(Examples):
    """Chats, instructions or texts as for ``shardwise finetune``, and the objective above."""

    def __init__(self, source: PretrainedModel, teacher: str | Path, *, alpha: float, temperature: float) -> None:
        super().__init__(source)
        if source.settings.parallel.pp > 1 or source.settings.parallel.exact:
            raise ConfigError("the teacher has no pipeline stages and no exact form; use neither --pp nor --exact")
        self.teacher, self.options = PretrainedFolder(teacher), {"alpha": alpha, "temperature": temperature}
        self.num_shared = min(self.teacher.description.vocab_size, source.folder.description.vocab_size)
        tokens, theirs = source.tokenizer.tokens, PaddedTokenizer.load(self.teacher.path).tokens
        if tokens != theirs or len(tokens) > self.num_shared:
            raise ConfigError(f"the teacher {teacher} has another tokenizer than {source.settings.base}, or fewer ids")
        # A checkpoint records it, so that no run resumes with another teacher or another loss.
        self.identity = {"teacher_sha256": digest_of(self.teacher), **self.options}

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Objective:
        teacher = load_pretrained(
            self.teacher.path,
            groups=Groups(tp=groups.tp, dp=groups.dp, cp=groups.cp),
            device=device,
            vocab_size=self.source.folder.description.vocab_size,
            sequence_parallel=self.settings.parallel.sequence_parallel and groups.tp.size() > 1,
        )
        assert isinstance(teacher, GPT)
        teacher.requires_grad_(False).eval()
        sizes = (self.source.folder.description.vocab_size, self.num_shared)
        return DistillationObjective(teacher, groups.tp, *sizes, **self.options)


def task_of(settings: FinetuneSettings, teacher: str | Path, **options: Any) -> Task:
    """The parts of a run: the student, the method above, and what ``shardwise finetune`` writes at the end."""
    source = PretrainedModel(settings)
    write = write_adapters if settings.lora.is_on and not settings.lora.lora_merge else write_model
    return Task(source.settings, source, Teacher(source, teacher, **options), write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="Hugging Face folder of the student")
    parser.add_argument("--teacher", required=True, help="Hugging Face folder of the teacher")
    parser.add_argument("--data", nargs="+", required=True, help="files and folders, as for shardwise finetune")
    parser.add_argument("--out", default="runs/distill")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--alpha", type=float, default=0.5, help="weight of the divergence")
    parser.add_argument("--temperature", type=float, default=1.0)
    flags = parser.parse_args()
    settings = from_keywords(
        FinetuneSettings,
        {
            "base": flags.base,
            "data": flags.data,
            "out": flags.out,
            "lora_rank": flags.lora_rank,
            "parallel": {"tp": flags.tp},
            "training": {"steps": flags.steps},
        },
    )
    run(settings, lambda each: task_of(each, flags.teacher, alpha=flags.alpha, temperature=flags.temperature))


if __name__ == "__main__":
    main()
