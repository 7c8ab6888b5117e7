"""The banner: the lines that a run prints before its first step."""

import math
import os
from collections.abc import Sequence

import torch

from shardwise.core.communication.overlap import OverlapMethod
from shardwise.core.sharding import fitting_ranks
from shardwise.kernels import dispatch
from shardwise.models.by_plan import library
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.experts.token_dispatch import gathers_tokens
from shardwise.models.transformer.context_attention import describe_context_method
from shardwise.models.transformer.heads import LocalHeads, split_heads
from shardwise.nn import named_param_layouts
from shardwise.nn.replicated import replicas_of
from shardwise.run.settings import RunSettings
from shardwise.run.tasks.task import Session
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.training.optimizer.mixed_precision import PRECISIONS


def banner(session: Session) -> str:
    """Describe the model, data and settings of a run in a few lines."""
    data, settings, topology = session.data, session.settings, session.topology
    tp, pp, cp, dp = (topology.size(axis) for axis in ("tp", "pp", "cp", "dp"))
    schedule = settings.parallel.pipeline_schedule
    chunks = settings.parallel.virtual_stages
    shared = ""
    for asked, flag, what in (
        (settings.parallel.zero, "--zero 1", "optimizer state split"),
        (settings.parallel.fsdp, "--fsdp", "weights, gradients and optimizer state split"),
    ):
        if asked:
            shared = f" ({what})" if dp * cp > 1 else f" ({flag} does nothing with one data-parallel rank)"
    stages = "" if pp == 1 else f"{pp} stages" + (f" of {chunks} chunks" if chunks > 1 else "") + f" ({schedule}), "
    size = _size(session.num_parameters)
    if session.num_trained < session.num_parameters:
        size = f"{_size(session.num_trained)} of {size}"
    return (
        f"text   {data.name}, sha256 {data.sha256[:12]}\n"
        + "".join(f"       {line}\n" for line in data.blend)
        + f"model  {settings.model_name}, {size} parameters, {settings.training.dtype}, "
        f"vocabulary {data.tokenizer.vocab_size:,}\n"
        + _computed_by(session)
        + f"ranks  {session.ranks.world_size} on {session.ranks.device.type}: tensor parallel {tp}, {stages}"
        + ("" if cp == 1 else f"context parallel {cp} ({_context_method(session)}), ")
        + f"data parallel {dp}"
        + shared
        + _experts(session)
        + (", sequence parallel" if settings.parallel.sequence_parallel and tp > 1 else "")
        + (f", through {session.transport}" if tp > 1 else "")
        + ("" if settings.parallel.parts is None else f", exact in {settings.parallel.parts} parts")
        + _idle(settings, tp)
        + _warmup(settings)
        + _parts(session)
        + _device(session)
        + _dropout(session)
        + _overlap(session)
        + speed(session)
        + "".join(f"\nattn   {kernel}" for kernel in session.trainer.attention_kernels())
    )


def _computed_by(session: Session) -> str:
    """Return the line about whose layers compute a folder's model; empty for a new model."""
    folder: PretrainedFolder | None = getattr(session.task.source, "folder", None)
    if folder is None:
        return ""
    if folder.description.transformers_config is None:
        return f"       computed by Shardwise's table of {folder.architecture.model_type}\n"
    model, way = session.trainer.model, ""
    if session.topology.size("tp") > 1 and isinstance(model, PlannedModel):
        way = f", split by its own plan; {model.described_loss}"
    return f"       computed by {library.name_of(folder.description)}{way}\n"


def _context_method(session: Session) -> str:
    """Return how attention reaches the positions of other context-parallel ranks."""
    topology, config = session.topology, session.trainer.model.config
    heads, groups, _ = config.heads
    split = split_heads(heads, groups, topology.size("tp"))
    local = LocalHeads(split.queries_of_groups(topology.rank("tp")))
    draws = config.attention_dropout > 0 and session.settings.training.rng == "global"
    return describe_context_method(config.cp_comm_type, local, topology.size("cp"), draws=draws)


def _experts(session: Session) -> str:
    """Describe the layout of a model's experts, if it has any."""
    experts, topology = session.trainer.model.config.experts, session.topology
    if experts is None:
        return ""
    ep, etp = topology.size("ep"), topology.size("expt_tp")
    split = "" if etp == 1 else f", each split over {etp} ranks"
    gathers = gathers_tokens(session.trainer.model.config.ep_comm_type, ep * etp, experts.per_token * etp)
    way = "" if ep * etp == 1 else " (all_gather)" if gathers else " (a2a)"
    return f", {experts.num} experts over {ep} {'rank' if ep == 1 else 'ranks'}{split}{way}"


def _idle(settings: RunSettings, tp: int) -> str:
    """Return a note on settings without effect in this layout, which scripts for several layouts may set."""
    if settings.parallel.sequence_parallel and tp == 1:
        return "\nnote   --sequence-parallel does nothing with one tensor-parallel rank"
    return ""


def _warmup(settings: RunSettings) -> str:
    """Return a note if the learning rate never reaches the value that was asked for."""
    warmup, steps = settings.optimizer.warmup_steps, settings.training.steps
    if warmup <= steps:
        return ""
    return (
        f"\nnote   the warm-up takes {warmup} steps and the run {steps}, so the learning rate stays below "
        f"{settings.optimizer.learning_rate:g}; see --optimizer.warmup-steps"
    )


def _parts(session: Session) -> str:
    """Return a note if only some tensor-parallel sizes fit an exact run's parts, with the sizes that fit."""
    settings, model = session.settings, session.trainer.model
    parts = settings.parallel.parts
    if parts is None:
        return ""
    replicas, named = replicas_of(model), named_param_layouts(model, session.topology.size("tp"))
    layouts = [layout for _, param, layout in named if not replicas[param].is_of_expert]
    num_groups = math.gcd(*(heads.groups for heads in model.config.kinds_of_heads))

    def sizes(number: int) -> list[int]:
        return [1, *(ranks for ranks in fitting_ranks(layouts, number) if num_groups % ranks == 0)]

    wanted = [1 << power for power in range(parts.bit_length()) if num_groups % (1 << power) == 0]
    if sizes(parts) == wanted:
        return ""
    fewer = [parts >> halvings for halvings in range(1, parts.bit_length() - 1)]
    others = (f"--exact-parts {number} for tp {_or(sizes(number))}" for number in fewer if len(sizes(number)) > 1)
    return (
        f"\nnote   --exact-parts {parts} ties this run to tp {_or(sizes(parts))}: other numbers of ranks hold no whole "
        f"parts; a new run may take {', '.join(others)}"
    )


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


# By schedule: how many messages overlap, and with what (docs/gpus.md).
_MESSAGES_OVERLAP = {"zero-bubble": ("", "weight gradients"), "interleaved": ("some of the ", "other micro-batches")}


def _device(session: Session) -> str:
    """Return the reason why the run uses the CPU instead of a GPU; on GPUs, which collectives overlap."""
    settings, ranks, topology = session.settings, session.ranks, session.topology
    if ranks.device.type == "cpu":
        return f"\ndevice cpu: {ranks.why_device}" if settings.device == "auto" and ranks.why_device else ""
    hidden, bare = [], []
    if topology.size("tp") > 1:
        queues = "CUDA_DEVICE_MAX_CONNECTIONS"
        hidden.append(
            "in the backward input gradients' sums"
            + (" and gathers" if session.trainer.model.config.sequence_parallel else "")
            + f" behind weight gradients ({queues} is {os.environ.get(queues, 'not set')})"
        )
        if not session.overlap:
            bare.append("the tensor-parallel collectives of the forward, and gathers of output gradients")
    if topology.size("dp") > 1:
        hidden.append("sums over data-parallel ranks behind the backward")
    if topology.size("pp") > 1:
        messages, behind = "stages' messages", _MESSAGES_OVERLAP.get(settings.parallel.pipeline_schedule)
        if behind is None:
            bare.append(messages)
        else:
            hidden.append(f"{behind[0]}{messages} behind {behind[1]}")
    if not hidden:
        return f"\noverlap none: {'; '.join(bare)}" if bare else ""
    return f"\noverlap {'; '.join(hidden)}" + "".join(f"\n       not {what}" for what in bare)


def _dropout(session: Session) -> str:
    """Return a note on the memory of attention's weights if dropout's masks must not depend on the layout."""
    settings, config, tp = session.settings, session.trainer.model.config, session.topology.size("tp")
    recompute = settings.recompute
    recomputed = recompute.granularity == "full" or (
        recompute.granularity == "selective" and "core_attn" in recompute.modules
    )
    if (
        session.ranks.device.type == "cpu"
        or config.attention_dropout == 0
        or settings.training.rng != "global"
        or recomputed
    ):
        return ""
    heads, s, b = (
        -(-config.heads[0] // tp),
        settings.sequence_length,
        settings.micro_batch_size(session.topology.size("dp")),
    )
    # docs/memory.md, "attention core, dropout".
    kept = 12 * heads * s * s * b
    return (
        f"\nnote   dropout in attention keeps the weights of all {heads} heads of {s:,} x {s:,} tokens: about "
        f"{kept / (1 << 20):,.0f} MiB a layer; --training.rng per_rank keeps none, but masks depend on the layout; "
        "--recompute.granularity selective computes them again"
    )


def _overlap(session: Session) -> str:
    """Describe how each pass of the linear layers overlaps with its collective, and why not in a faster way."""
    passes: dict[OverlapMethod, list[str]] = {}
    for pass_, way in session.overlap:
        passes.setdefault(way, []).append(pass_)
    names = {"whole": "at once", "parts": "in parts", "symmetric memory": "through symmetric memory"}
    return "".join(f"\nlayers {names[way.name]}: {', '.join(those)} ({way.why})" for way, those in passes.items())


def _size(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 100_000 else f"{number / 1e3:.1f} K"


def speed(session: Session) -> str:
    """Return the lines of the banner about the fast paths of the run, and why it does not take the others."""
    settings, trainer = session.settings, session.trainer
    config, tp = trainer.model.config, session.topology.size("tp")
    tokens = settings.micro_batch_size(session.topology.size("dp")) * settings.sequence_length
    logits = tokens * session.data.tokenizer.vocab_size // tp
    inner = tokens * (config.ffn_hidden_size or 0) // tp
    sizes = {dispatch.LOSS_CPU: logits, dispatch.LOSS_TRITON: logits, dispatch.ONEDNN: inner * config.hidden_size}
    if config.normalization == "RMSNorm":
        sizes[dispatch.RMS_NORM] = sizes[dispatch.ELEMENTWISE] = tokens * config.hidden_size
        sizes[dispatch.ADD_NORM_TRITON] = sizes[dispatch.ELEMENTWISE_TRITON] = tokens * config.hidden_size
    precision = PRECISIONS[settings.training.dtype]
    updates_fp32 = precision.has_masters or precision.params_dtype == torch.float32
    if settings.optimizer.name == "adamw" and updates_fp32 and settings.parallel.parts is None:
        sizes[dispatch.ADAMW_TRITON] = session.num_trained
    device_type, refusal = session.ranks.device.type, trainer.optimizer.why_not_fused
    choices = [
        *tf32(device_type, settings.training.dtype),
        dispatch.Choice("fused optimizer step", refusal is None, refusal or "always"),
        *dispatch.report(device_type, config.params_dtype, sizes=sizes),
    ]
    names = {choice: choice.name.removesuffix(f" on {device_type}") for choice in choices}
    taken = "; ".join(name for choice, name in names.items() if choice.on)
    left = "".join(f"\n       no {name}: {choice.why}" for choice, name in names.items() if not choice.on)
    return f"\nspeed  {taken}{left}"


def tf32(device_type: str, dtype: str) -> list[dispatch.Choice]:
    """Report whether CUDA's tensor cores multiply fp32 matrices; empty without tensor cores."""
    if device_type != "cuda" or PRECISIONS[dtype].params_dtype != torch.float32:
        return []
    uses_tf32 = PRECISIONS[dtype].uses_tf32
    return [dispatch.Choice("TF32 products", uses_tf32, "always" if uses_tf32 else "--training.dtype tf32 has them")]
