"""Distillation: train a model on the predictions of a larger teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.data import IGNORE_INDEX, Batch
from shardwise.data.tokenizer import PaddedTokenizer, Tokenizer
from shardwise.models.gpt import GPT
from shardwise.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_kl_div
from shardwise.run.settings import DistillSettings, TeacherSettings
from shardwise.run.tasks.pretrained_model import PretrainedModel, digest_of
from shardwise.run.tasks.samples import Examples
from shardwise.run.tasks.task_data import TaskData
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedConfig, PretrainedFolder
from shardwise.training.objective import CrossEntropy, Objective


@dataclass(frozen=True)
class DistillationObjective(Objective):
    """Loss ``alpha T² KL + (1 - alpha) CE`` of each trained token (Hinton et al. 2015, arXiv:1503.02531).

    Student and teacher split the vocabulary in the same way; logits are never gathered.

    Attributes:
        settings: settings of the loss.
        teacher: teacher model, in evaluation mode and without gradients.
        group: the ranks that split both vocabularies.
        vocab_size: vocabulary size of the student; both models are split by it.
        num_shared: number of leading ids that both models have; the divergence is taken over these ids.
    """

    settings: TeacherSettings
    teacher: GPT
    group: ProcessGroup
    vocab_size: int
    num_shared: int

    shares_samples = True
    names = ("cross_entropy", "divergence")

    @property
    def depends_on_length(self) -> bool:
        """True if the teacher's output depends on the length."""
        return self.teacher.depends_on_length

    def inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the model's arguments without labels, so that the student returns logits."""
        return super().inputs(batch) | {"labels": None}

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return sums over trained labels. The divergence is reported without ``T²``."""
        settings, context = self.settings, self.teacher.view_of(batch.labels.size(1)).context
        labels = (batch.labels if context is None else context.own(batch.labels, dim=1)).t().contiguous()
        with torch.no_grad():
            taught: Tensor = self.teacher(**self.inputs(batch))
        pair = (output, taught) if settings.divergence == "forward" else (taught, output)
        divergence = vocab_parallel_kl_div(
            *pair,
            temperature=settings.temperature,
            group=self.group,
            vocab_size=self.num_shared,
            padded_vocab_size=self.vocab_size,
        )
        divergence = divergence.masked_fill(labels == IGNORE_INDEX, 0.0).sum(dtype=dtype)
        each = vocab_parallel_cross_entropy(output, labels, group=self.group, vocab_size=self.vocab_size)
        cross_entropy = each.sum(dtype=dtype)
        weight = settings.alpha * settings.temperature**2
        loss = weight * divergence + (1 - settings.alpha) * cross_entropy
        return loss, torch.stack([cross_entropy.detach().double(), divergence.detach().double()])

    @property
    def of_evaluation(self) -> Objective:
        """Evaluate by the cross entropy of the student."""
        return CrossEntropy()

    def reported(self, means: Sequence[float], bits_per_nat: float) -> dict[str, float]:
        """Report both terms of the loss, and the cross entropy in bits per byte."""
        return super().reported(means, bits_per_nat) | {"bits_per_byte": means[1] * bits_per_nat}


class Teacher(Examples):
    """Train a pretrained model on the predictions of a teacher.

    Args:
        source: source of the student, which is not built yet.

    Raises:
        ConfigError: the teacher is not a causal model, has another tokenizer or reads only shorter sequences.
        CheckpointError: a file is missing or damaged.
        DataError: the teacher's folder has no tokenizer.
    """

    def __init__(self, source: PretrainedModel) -> None:
        super().__init__(source)
        settings = source.settings
        assert isinstance(settings, DistillSettings)
        assert settings.distillation.teacher is not None
        self._loss, path = settings.distillation, Path(settings.distillation.teacher)
        self.teacher = PretrainedFolder(path)
        described = self.teacher.description
        check_teacher(self.teacher.config, settings, path)
        # Models of one family share a tokenizer, but often pad their vocabularies to different sizes.
        self.num_shared = min(described.vocab_size, source.folder.description.vocab_size)
        _check_same_tokens(source.tokenizer, PaddedTokenizer.load(path), settings.base, path)
        if source.tokenizer.vocab_size > self.num_shared:
            raise ConfigError(
                f"the teacher {path} has {described.vocab_size} ids, fewer than the {source.tokenizer.vocab_size} of "
                f"its tokenizer and that of {settings.base}"
            )
        self.identity = {"teacher_sha256": digest_of(self.teacher)}

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Objective:
        """Load the teacher in its own dtype, and return the objective."""
        sequence_parallel = self.settings.parallel.sequence_parallel and groups.tp.size() > 1
        vocab_size = self.source.folder.description.vocab_size
        teacher = load_pretrained(
            self.teacher.path,
            groups=Groups(tp=groups.tp, dp=groups.dp, cp=groups.cp),
            device=device,
            vocab_size=vocab_size,
            sequence_parallel=sequence_parallel,
        )
        assert isinstance(teacher, GPT)
        teacher.requires_grad_(False).eval()
        return DistillationObjective(self._loss, teacher, groups.tp, vocab_size, self.num_shared)


def check_teacher(teacher: PretrainedConfig, settings: DistillSettings, path: Path) -> None:
    """Raise ConfigError unless the teacher is a causal model that reads sequences as long as the student's."""
    described = teacher.description
    if described.kind != "gpt":
        raise ConfigError(f"the teacher {path} is a {teacher.architecture.model_type} model, no causal one")
    longest = described.max_sequence_length
    if settings.sequence_length > longest:
        raise ConfigError(
            f"model.sequence-length {settings.sequence_length} is more than {longest}, the longest sequence "
            f"of the teacher {path}"
        )


def _check_same_tokens(own: Tokenizer, of_teacher: Tokenizer, base: str, path: Path) -> None:
    """Raise ConfigError if an id stands for different tokens in the student and the teacher."""
    student, teacher = own.tokens, of_teacher.tokens
    for token in sorted(student.keys() | teacher.keys()):
        if student.get(token) != teacher.get(token):
            names = [repr(each[token]) if token in each else "none" for each in (student, teacher)]
            raise ConfigError(
                f"the tokenizer of the teacher {path} is another one: id {token} is {names[1]} there and {names[0]} in "
                f"{base}; a teacher needs the same tokens"
            )
