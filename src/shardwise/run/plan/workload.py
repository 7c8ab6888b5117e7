"""What is planned: a model and how it is trained, and how it is split.

What data-parallel ranks share out with ``zero``: how large the buffers are, and what each rank owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.core.errors import ConfigError
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.description import ModelDescription
from shardwise.nn.quantization import Quantization
from shardwise.run.plan.parameters import Parameter
from shardwise.training.gradients.bucket import DEFAULT_BUCKET_SIZE, place


@dataclass(frozen=True)
class Recomputation:
    """What is computed again in the backward, as in ``models.config.RecomputeConfig``; nothing if ``granularity`` is
    None."""

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ()

    def recomputes(self, module: str) -> bool:
        """Whether it is one of the parts that are recomputed in every layer."""
        return self.granularity == "selective" and module in self.modules

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        if self.granularity == "full":
            return f"full ({self.method}, {self.num_layers} layer{'s' if self.num_layers > 1 else ''})"
        return "none"


@dataclass(frozen=True)
class Adaptation:
    """Adapters that are trained, and what they stand beside.

    Attributes:
        config: of the adapters, whose targets are names of Hugging Face's.
        architecture: the ``model_type`` whose names these are.
        quantization: what the frozen weights of linear layers are kept in; their own dtype if None.
    """

    config: LoraConfig
    architecture: str
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Workload:
    """A model, and how it is trained, whatever the ranks.

    Attributes:
        model: a ``"gpt"``.
        sequence_length: tokens in a sample.
        global_batch_size: samples in a step.
        element_bytes: of a parameter, and of what the forward computes.
        has_masters: gradients are summed in fp32, and the optimizer updates fp32 copies of the parameters.
        optimizer: ``"adamw"`` or ``"muon"``.
        fuses_loss: output layer and loss are one (``linear_fused``).
        loss_memory_budget: bytes of logits from which on the fused loss takes slices of the vocabulary.
        dropout_is_global: masks are those of one rank at every layout, and take a byte an element.
        fuses_swiglu_from: elements of gate and up from which on SwiGLU is one loop that keeps nothing between them;
            None for never.
        adaptation: adapters, beside which the model is frozen; all of it is trained if None.
    """

    model: ModelDescription
    sequence_length: int
    global_batch_size: int
    element_bytes: int = 4
    has_masters: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fuses_loss: bool = True
    loss_memory_budget: int = 2 << 30
    dropout_is_global: bool = True
    fuses_swiglu_from: int | None = None
    adaptation: Adaptation | None = None

    def __post_init__(self) -> None:
        if self.model.kind != "gpt":
            raise ConfigError(f"a {self.model.kind} model is not trained here; only causal models are planned")

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient, once it is summed over micro-batches."""
        return 4 if self.has_masters else self.element_bytes

    @property
    def statistics_bytes(self) -> int:
        """Of a number per token that is computed in fp32, or in fp64 for fp64."""
        return max(4, self.element_bytes)


@dataclass(frozen=True)
class Mesh:
    """How ranks share the work.

    Attributes:
        tp: ranks that split each layer.
        pp: pipeline stages.
        dp: ranks that see different samples.
        sequence_parallel: what lies between tensor-parallel regions is split along the sequence.
        schedule: of the pipeline.
        virtual_stages: parts of the model on each stage.
        micro_batch_size: samples per forward and backward on a rank.
        zero: 1 splits the optimizer's state and the fp32 weights over the data-parallel ranks.
        fsdp: splits parameters, gradients and state over them.
        recomputation: what is recomputed.

    Raises:
        ConfigError: zero and fsdp together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    zero: int = 0
    fsdp: bool = False
    recomputation: Recomputation = field(default_factory=Recomputation)

    def __post_init__(self) -> None:
        if self.zero and self.fsdp:
            raise ConfigError("zero 1 splits optimizer state, which fsdp does too; choose one")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.pp * self.dp

    @property
    def splits_sequence(self) -> bool:
        """On one rank there is nothing to split."""
        return self.sequence_parallel and self.tp > 1

    @property
    def splits_state(self) -> bool:
        """With one data-parallel rank ``zero`` does nothing."""
        return self.zero > 0 and self.dp > 1

    @property
    def shards_fully(self) -> bool:
        """With one data-parallel rank ``fsdp`` does nothing."""
        return self.fsdp and self.dp > 1

    def num_micro_batches(self, workload: Workload) -> int:
        """Of a step, on each data-parallel rank."""
        return workload.global_batch_size // (self.dp * self.micro_batch_size)

    def check(self, workload: Workload) -> None:
        """Raise ConfigError if the model or the batch cannot be split so."""
        model, batch = workload.model, workload.global_batch_size
        if self.shards_fully and workload.adaptation is not None and workload.adaptation.quantization is not None:
            raise ConfigError(f"fsdp cannot split a base in {workload.adaptation.quantization}; choose one of the two")
        if model.num_attention_heads < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.num_attention_heads} attention heads; lower it")
        if model.vocab_size < self.tp:
            raise ConfigError(f"tp {self.tp} is more than the {model.vocab_size} ids of the vocabulary; lower it")
        if model.num_layers < self.pp * self.virtual_stages:
            raise ConfigError(
                f"the model's {model.num_layers} layers are fewer than the {self.pp * self.virtual_stages} parts of pp "
                f"{self.pp} x virtual stages {self.virtual_stages}; each needs a layer"
            )
        if batch % (self.dp * self.micro_batch_size) != 0:
            raise ConfigError(
                f"the global batch of {batch} samples is not a multiple of dp {self.dp} x micro-batches of "
                f"{self.micro_batch_size}"
            )
        if self.virtual_stages > 1 and self.num_micro_batches(workload) % self.pp != 0:
            raise ConfigError(
                f"{self.num_micro_batches(workload)} micro-batches are not a multiple of pp {self.pp}, as interleaved "
                "stages need"
            )

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        parts += [f"pp {self.pp}"] * (self.pp > 1) + [f"dp {self.dp}"] * (self.dp > 1)
        parts += ["sequence parallel"] * self.splits_sequence
        parts += ["zero 1"] * bool(self.zero) + ["fsdp"] * self.fsdp
        recomputed = self.recomputation.granularity is not None
        return ", ".join(parts) + f", recompute {self.recomputation}" * recomputed


@dataclass(frozen=True)
class Shares:
    """Buffers of gradients, after which parameters lie too.

    Attributes:
        scattered: elements, padding included, whose sums go to their owners.
        whole: elements, padding included, whose sums go to every rank, as they are summed over other ranks too.
        owned: by data-parallel rank, elements without padding.
        matrices: by data-parallel rank, those of matrices.
    """

    scattered: int
    whole: int
    owned: tuple[int, ...]
    matrices: tuple[int, ...]


def shares_of(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> Shares:
    """Of a rank with the parameters ``params``."""
    owned, matrices = [0] * mesh.dp, [0] * mesh.dp
    ends = []
    for is_whole in (False, True):
        # As the buffers have them: the last first.
        indices = [
            index
            for index in reversed(range(len(params)))
            if is_summed_elsewhere(workload, mesh, params[index]) is is_whole
        ]
        if not indices:
            ends.append(0)
            continue
        placement = place(
            [params[index].numel for index in indices], bucket_size=DEFAULT_BUCKET_SIZE, world_size=mesh.dp
        )
        ends.append(placement.bounds[-1])
        for number, places in enumerate(placement.buckets):
            first = placement.bounds[number]
            size = (placement.bounds[number + 1] - first) // mesh.dp
            for each in places:
                param, start = params[indices[each]], placement.starts[each] - first
                stop = start + param.numel
                for rank in range(start // size, -(-stop // size)) if size else ():
                    count = min(stop, (rank + 1) * size) - max(start, rank * size)
                    owned[rank] += count
                    matrices[rank] += count if param.is_matrix else 0
    return Shares(ends[0], ends[1], tuple(owned), tuple(matrices))


def is_summed_elsewhere(workload: Workload, mesh: Mesh, param: Parameter) -> bool:
    """Whether a gradient is summed over tensor-parallel ranks or stages, beside the data-parallel ranks."""
    if mesh.tp > 1 and (param.is_of_heads or param.num_shared or (param.is_partial and mesh.splits_sequence)):
        return True
    return mesh.pp > 1 and is_tied(workload, param)


def is_tied(workload: Workload, param: Parameter) -> bool:
    """Whether it is a weight that embedding and output layer have in common."""
    is_embedding = param.name == "embedding.word_embeddings.weight"
    return param.is_copy or (workload.model.share_embeddings_and_output_weights and is_embedding)
