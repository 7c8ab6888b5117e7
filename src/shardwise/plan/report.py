"""Plans as tables for people, and as JSON for programs."""

from collections.abc import Sequence
from typing import Any

from shardwise.plan.generation import GenerationPlan
from shardwise.plan.machine import CONTEXT_BYTES, SLACK, Rates, StepTime, Surroundings
from shardwise.plan.plan import Plan, RankPlan
from shardwise.plan.workload import Mesh
from shardwise.run.quantities import shown_bytes
from shardwise.training.optimizer.mixed_precision import PRECISIONS

_AXES = ("tp", "pp", "cp", "dp", "ep")


def plan_as_json(plan: Plan, rates: Rates = Rates()) -> dict[str, Any]:  # noqa: B008  # Frozen.
    """All numbers of a plan, in bytes and seconds."""
    around = Surroundings.of(plan, rates.ranks_per_host)
    return {
        "layout": layout_as_json(plan.mesh),
        "parameters": plan.num_parameters,
        "stages": [_rank_as_json(plan, rank, rates) for rank in plan.stages],
        "worst": {"stage": plan.worst.stage, "tp_rank": plan.worst.tp_rank, "total": plan.worst.total},
        "sent": plan.sent,
        "repeated_work": plan.repeated_work,
        "idle_share": plan.idle_share,
        "host": {
            "ranks": around.ranks,
            "total": around.host,
            "tensors": around.tensors,
            "shared_memory": [
                {"axis": each.axis, "ranks": each.ranks, "groups": each.groups, "bytes": each.num_bytes}
                for each in around.channels
            ],
            "batches": around.ranks * around.batches,
            "snapshot": around.snapshot,
            "processes_assumed": around.processes,
        },
        "device": None
        if not around.context
        else {
            "total": plan.worst.total + around.beyond,
            "batches": around.batches,
            "context_assumed": around.context,
            "slack_assumed": around.slack,
        },
    }


def _rank_as_json(plan: Plan, rank: RankPlan, rates: Rates) -> dict[str, Any]:
    step, time = rank.step, StepTime.of(rank, plan.idle_share, rates)
    live, parts = rank.held, []
    for segment in step.segments:
        parts.append(
            {"part": step.name(segment.place), "bytes": live, "peak": live + segment.peak, "flops": segment.flops}
        )
        live += segment.net
    return {
        "stage": rank.stage,
        "tp_rank": rank.tp_rank,
        "dp_rank": rank.dp_rank,
        "rank": rank.rank,
        "layers": [[part.start, part.stop] for part in step.parts],
        "parameters": step.num_parameters,
        **{name: getattr(step, name) for name in ("weights", "gradients", "masters", "optimizer", "others")},
        "activations": step.kept,
        "in_flight": step.in_flight,
        "working": rank.working,
        "total": rank.total,
        "peak_at": rank.peak_at,
        "flops": rank.flops,
        "sent": {axis: rank.sent(axis) for axis in _AXES},
        "sent_between_hosts": {axis: rank.sent(axis, between_hosts=rates.ranks_per_host) for axis in _AXES},
        "collectives": [
            {
                "axis": call.axis,
                "name": call.name,
                "ranks": list(rank.group(call)),
                "bytes": call.num_bytes,
                "calls": number,
                "sent": number * rank.volume(call),
                "sent_between_hosts": round(rank.leaving(call, rates.ranks_per_host) * number * rank.volume(call)),
            }
            for call, number in sorted(rank.calls.items())
        ],
        "seconds": None if time is None else vars(time) | {"least": time.least, "most": time.most},
        "step": parts,
    }


def layout_as_json(mesh: Mesh) -> dict[str, Any]:
    """The layout's settings by name."""
    recompute = mesh.recomputation
    return {
        "ranks": mesh.world_size,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "dp": mesh.num_sample_ranks,
        "ep": mesh.ep,
        "etp": mesh.expert_tp,
        "sequence_parallel": mesh.splits_sequence,
        "pipeline_schedule": mesh.schedule,
        "virtual_stages": mesh.virtual_stages,
        "zero": mesh.zero,
        "fsdp": mesh.fsdp,
        "recompute_granularity": None if recompute.granularity == "none" else recompute.granularity,
        "recompute_modules": [module for module in recompute.modules if recompute.recomputes(module)],
        "micro_batch_size": mesh.micro_batch_size,
    }


def plan_as_table(plan: Plan, rates: Rates = Rates(), *, machines: bool = True) -> str:  # noqa: B008  # Frozen.
    """A line for each stage and the rank that needs the most; with ``machines`` also memory besides its tensors."""
    axes = [axis for axis in _AXES if getattr(plan.mesh, axis) > 1]
    rows = []
    for rank in plan.stages:
        step = rank.step
        numbers = {"weights": step.weights, "gradients": step.gradients, "fp32 copies": step.masters}
        numbers["optimizer"] = step.optimizer
        if any(each.step.others for each in plan.stages):
            numbers["others"] = step.others
        numbers |= {"activations": step.kept, "working": rank.working, "total": rank.total}
        numbers |= {f"sent {axis}": rank.sent(axis) for axis in axes}
        rows.append([str(rank.stage), _layers(rank), *map(shown_bytes, numbers.values())])
    rows.insert(0, ["stage", "layers", *numbers])
    worst, slowest = plan.worst, max(plan.stages, key=lambda rank: rank.flops)
    lines = [
        *_heading(plan),
        "",
        aligned(rows),
        "",
        f"Most memory: tensor-parallel rank {worst.tp_rank} of stage {worst.stage}, {shown_bytes(worst.total)}, in the "
        f"{worst.peak_at}.",
        *_time(plan, slowest, rates),
        *(["", *_machines(plan, rates)] if machines else []),
    ]
    return "\n".join(lines)


def rank_as_table(plan: Plan, rates: Rates = Rates()) -> str:  # noqa: B008  # Frozen.
    """All numbers of the one rank of a plan."""
    (rank,), mesh, hosts = plan.stages, plan.mesh, rates.ranks_per_host
    step = rank.step
    parts = {
        "weights": step.weights,
        "gradients": step.gradients,
        "fp32 copies": step.masters,
        "optimizer": step.optimizer,
        "other tensors": step.others,
    }
    rows = [["axis", "call", "ranks", "calls", "bytes of each", "sent", "to other hosts"]]
    for call, number in sorted(rank.calls.items(), key=lambda item: -item[1] * rank.volume(item[0])):
        sent = number * rank.volume(call)
        leaving = round(rank.leaving(call, hosts) * sent)
        numbers = [str(number), *map(shown_bytes, (call.num_bytes, sent, leaving))]
        rows.append([call.axis or "-", call.name.replace("_", "-"), _ranks(rank.group(call)), *numbers])
    total, away = rank.sent(), rank.sent(between_hosts=hosts)
    share = f" ({100 * away / total:.0f} %)" if total else ""
    lines = [
        *_heading(plan),
        f"rank   {rank.rank}: stage {rank.stage} with layers {_layers(rank)}, tensor-parallel rank {rank.tp_rank}, "
        f"data-parallel rank {rank.dp_rank}, {step.num_parameters:,} parameters",
        "",
        "held   " + ", ".join(f"{name} {shown_bytes(number)}" for name, number in parts.items() if number),
        f"peak   {shown_bytes(rank.total)}, in the {rank.peak_at}; activations take {shown_bytes(step.kept)} at most",
        *(
            [f"pipe   {step.in_flight} in flight at most; the wait for other stages adds {100 * plan.idle_share:.1f} %"]
            if mesh.pp > 1
            else []
        ),
        f"work   {rank.flops:,} floating-point operations of products and attention in a step",
        *_time(plan, rank, rates),
        "",
        *(
            [aligned(rows), f"\nSent in a step: {shown_bytes(total)}, {shown_bytes(away)}{share} of it to other hosts."]
            if total
            else ["It sends nothing."]
        ),
        "",
        *_machines(plan, rates),
    ]
    return "\n".join(lines)


def _heading(plan: Plan) -> list[str]:
    workload, mesh, settings = plan.workload, plan.mesh, plan.workload.settings
    precision = PRECISIONS[settings.training.dtype]
    samples, number = workload.global_batch_size, mesh.num_micro_batches(workload)
    return [
        f"model  {plan.num_parameters:,} parameters, {precision.params_dtype.itemsize} bytes each"
        + (", with fp32 copies" if precision.has_masters else "")
        + f", {settings.optimizer.name}",
        f"ranks  {mesh.world_size}: {mesh}",
        f"step   {samples:,} sample{'s' * (samples > 1)} of {settings.sequence_length:,} tokens: on each rank "
        f"{number} micro-batch{'es' if number > 1 else ''} of {mesh.micro_batch_size}"
        + (f", {_in_flight(plan)} in flight at a time" if mesh.pp > 1 else ""),
    ]


def _layers(rank: RankPlan) -> str:
    return "+".join(f"{part.start}-{part.stop - 1}" for part in rank.step.parts)


def _ranks(group: tuple[int, ...]) -> str:
    """Few ranks by number, many by the first and the last."""
    if len(group) <= 4:
        return ", ".join(map(str, group)) or "-"
    return f"{group[0]}, {group[1]}, ... {group[-1]}"


def _time(plan: Plan, rank: RankPlan, rates: Rates) -> list[str]:
    """The estimate of a step's time, if the device's rate is stated."""
    time = StepTime.of(rank, plan.idle_share, rates)
    if time is None or rates.flops is None:
        return []
    known = {axis: seconds for axis, seconds in time.communication.items() if seconds is not None}
    unknown = [axis for axis in time.communication if axis not in known]
    parts = {f"products at {rates.flops / 1e12:g} TFLOP/s": time.compute, "waiting for stages": time.idle}
    parts |= {axis or "others": seconds for axis, seconds in known.items()}
    lines = [
        f"time   {_seconds(time.least)} if products hide all communication"
        + (f", {_seconds(time.most)} if they hide none" if time.most is not None else ""),
        "       " + ", ".join(f"{_seconds(seconds)} {what}" for what, seconds in parts.items() if seconds),
    ]
    if unknown:
        names = ", ".join(axis or "others" for axis in unknown)
        lines.append(f"       no time for {names}: give --host-bandwidth and --network-bandwidth")
    return [*lines, "       (products at the peak and full links are assumed; a step takes longer)"]


def _seconds(number: float) -> str:
    return f"{1000 * number:.3g} ms" if number < 1 else f"{number:.3g} s"


def _machines(plan: Plan, rates: Rates) -> list[str]:
    """The memory of a device and of a host, line by line."""
    around, worst = Surroundings.of(plan, rates.ranks_per_host), plan.worst
    device, host = [], []
    if around.context:
        device = [
            ("tensors at the peak", worst.total, ""),
            ("samples", around.batches, "of this step and the next"),
            ("CUDA", around.context, "assumed: context, libraries, NCCL"),
            ("slack", around.slack, f"assumed: {100 * SLACK:g} % of the tensors that the allocator cannot use"),
        ]
    else:
        host = [("tensors at the peaks", around.tensors, "")]
    for each in around.channels:
        groups = f"{each.groups} group{'s' * (each.groups > 1)}"
        host.append((f"shared memory {each.axis}", each.groups * each.num_bytes, f"{groups} of {each.ranks} ranks"))
    host += [
        ("samples", around.ranks * around.batches, "the data's files are not counted"),
        ("copies for saves", around.snapshot, "--training.no-asynchronous-saves needs none" if around.snapshot else ""),
        ("Python and PyTorch", around.processes, f"assumed: {shown_bytes(around.processes // around.ranks)} a process"),
    ]
    lines = []
    for name, rows in (("a GPU", device), (f"a host of {around.ranks} rank{'s' * (around.ranks > 1)}", host)):
        if not rows:
            continue
        lines.append(f"{name}: {shown_bytes(sum(number for _, number, _ in rows))}")
        width = max(len(what) for what, _, _ in rows)
        lines += [f"  {what:<{width}}  {shown_bytes(number):>9}  {note}".rstrip() for what, number, note in rows]
    return lines


def _in_flight(plan: Plan) -> str:
    numbers = [rank.step.in_flight for rank in plan.stages]
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns to the right, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def generation_as_json(plan: GenerationPlan) -> dict[str, Any]:
    """All numbers of a plan of generation, in bytes."""
    text = plan.text
    return {
        "ranks": plan.ranks,
        "rank": plan.rank,
        "parameters": plan.num_parameters,
        "dtype": str(text.dtype).removeprefix("torch."),
        "layers": plan.layers,
        "batch_size": text.batch_size,
        "prompt_length": text.prompt_length,
        "max_new_tokens": text.max_new_tokens,
        "weights": plan.weights,
        "cache": plan.cache,
        "cache_per_token": plan.cache_per_token,
        "prompt_peak": plan.prompt.peak,
        "token_peak": plan.token.peak,
        "total": plan.total,
        "peak_at": plan.peak_at,
        "device": None
        if not plan.beyond
        else {
            "total": plan.total + plan.beyond,
            "context_assumed": CONTEXT_BYTES,
            "slack_assumed": plan.beyond - CONTEXT_BYTES,
        },
    }


def generation_as_table(plans: Sequence[GenerationPlan]) -> str:
    """A line for each number of ranks."""
    text, rows = plans[0].text, [["ranks", "batch", "weights", "cache", "a token", "prompt", "last token", "total"]]
    for plan in plans:
        parts = (plan.weights, plan.cache, round(plan.cache_per_token), plan.prompt.peak, plan.token.peak, plan.total)
        rows.append([str(plan.ranks), str(plan.text.batch_size), *map(shown_bytes, parts)])
    best = plans[0]
    dtype = str(text.dtype).removeprefix("torch.")
    lines = [
        f"model  {best.num_parameters:,} parameters in {dtype}, layers: {best.layers}",
        f"text   prompts of {text.prompt_length:,} tokens, {text.max_new_tokens:,} new tokens each",
        "",
        aligned(rows),
        "",
        "cache: of all tokens of the batch; a token: cache of one token of one text; prompt and last token: the most",
        f"bytes besides weights and cache while they are computed. The most is needed by rank {best.rank} of "
        f"{best.ranks}, in the {best.peak_at}.",
    ]
    if best.beyond:
        lines.append(
            f"A GPU needs {shown_bytes(best.total + best.beyond)} with CUDA's {shown_bytes(CONTEXT_BYTES)} and "
            f"{100 * SLACK:g} % that the allocator cannot use (both assumed)."
        )
    return "\n".join(lines)
