"""Which layouts fit into the memory of a rank, best first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.core.errors import ConfigError
from shardwise.run.plan.memory_plan import Plan, make_plan
from shardwise.run.plan.workload import Mesh, Recomputation, Workload

# From what costs nothing to what costs a forward.
_RECOMPUTATIONS = (
    Recomputation(),
    Recomputation("selective", modules=("layernorm", "mlp_act")),
    Recomputation("full"),
)


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        plan: of the layout.
    """

    plan: Plan

    @property
    def extra_work(self) -> float:
        """What recomputation and the pipeline's idle time add to a step, as a share of its work."""
        return self.plan.repeated_work + self.plan.idle_share

    @property
    def order(self) -> tuple[float, int, bool, int]:
        """Least first: extra work to a thousandth, bytes that a rank sends in a step, whether anything at all is
        recomputed, and bytes of the worst rank.
        """
        recomputes = self.plan.mesh.recomputation.granularity is not None
        return round(self.extra_work, 3), self.plan.sent, recomputes, self.plan.worst.total


def fitting(
    workload: Workload,
    limit: int,
    *,
    world_sizes: Sequence[int],
    micro_batch_size: int | None = None,
    ranks_per_host: int = 8,
    like: Mesh | None = None,
) -> list[Choice]:
    """The layouts whose worst rank needs at most ``limit`` bytes, best first.

    Args:
        workload: what is trained.
        limit: bytes of a rank.
        world_sizes: numbers of ranks.
        micro_batch_size: as given; if None the largest of those that halve a data-parallel rank's samples (with
            pipeline stages: 1) that fits.
        ranks_per_host: the largest tp, whose ranks exchange the most.
        like: whose pipeline schedule and virtual stages are taken, and its recomputation where there is one.

    Returns:
        In the order of ``Choice.order``.
    """
    like = like or Mesh()
    choices = []
    for mesh in _layouts(workload, world_sizes, ranks_per_host, like):
        for samples in _micro_batch_sizes(workload, mesh, micro_batch_size):
            try:
                plan = make_plan(workload, replace(mesh, micro_batch_size=samples))
            except ConfigError:
                continue
            if plan.worst.total <= limit:
                choices.append(Choice(plan))
                break
    return sorted(choices, key=lambda choice: choice.order)


def _layouts(workload: Workload, world_sizes: Sequence[int], ranks_per_host: int, like: Mesh) -> Iterator[Mesh]:
    model = workload.model
    again = (like.recomputation,) if like.recomputation.granularity is not None else _RECOMPUTATIONS
    for world_size in world_sizes:
        for tp in _divisors(world_size, min(ranks_per_host, model.num_attention_heads)):
            for pp in _divisors(world_size // tp, model.num_layers):
                dp = world_size // (tp * pp)
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    for zero, fsdp in _sharded(workload, like, dp, pp):
                        for recomputation in again:
                            yield replace(
                                like,
                                tp=tp,
                                pp=pp,
                                dp=dp,
                                sequence_parallel=sequence_parallel,
                                virtual_stages=like.virtual_stages if pp > 1 else 1,
                                schedule=like.schedule if pp > 1 else "1f1b",
                                zero=zero,
                                fsdp=fsdp,
                                recomputation=recomputation,
                            )


def _sharded(workload: Workload, like: Mesh, dp: int, pp: int) -> Iterator[tuple[int, bool]]:
    yield 0, False
    if dp > 1:
        yield 1, False
    # fully_shard sums a layer's gradients when its backward ends.
    if dp > 1 and not (pp > 1 and like.schedule == "zero-bubble"):
        yield 0, True


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def _micro_batch_sizes(workload: Workload, mesh: Mesh, given: int | None) -> Iterator[int]:
    if given is not None or mesh.pp > 1:
        yield given or 1
        return
    samples = workload.global_batch_size // mesh.dp
    while samples:
        yield samples
        samples = samples // 2 if samples % 2 == 0 else int(samples > 1)
