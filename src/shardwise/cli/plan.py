"""The command ``plan``, with the settings of each command that it plans."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import Arguments, SettingsArguments, check_model
from shardwise.core.atomic_files import check_output
from shardwise.core.errors import ConfigError
from shardwise.run.quantities import read_bytes
from shardwise.run.settings import FinetuneSettings, PlannedDpoSettings, PlannedFinetuneSettings, PlanSettings
from shardwise.training.bounds import (
    BATCH,
    DEFAULT_RANKS_PER_HOST,
    LOCAL_RANKS,
    NEW_TOKENS,
    RANKS,
    SEQUENCE,
    Folder,
    Range,
    check_value,
)

if TYPE_CHECKING:
    from shardwise.plan.machine import Rates
    from shardwise.plan.workload import Workload

_SHOWN = 20
_RANK = Range(0, 2**31 - 1)
_KINDS = ("train", "finetune", "dpo", "generate")


def _world_sizes(ranks: tuple[str, ...], fit: str | None, limits: Range) -> tuple[int, ...]:
    """Parse ``--ranks``, or ``--nproc``."""
    if fit is None and len(ranks) > 1:
        raise ConfigError(f"--ranks (--nproc) has {len(ranks)} numbers; several go with --fit only")
    numbers = []
    for text in ranks:
        if not text.isdecimal() or len(text) > 9:
            raise ConfigError(f"--ranks (--nproc) {text!r} is not a number of ranks; give integers such as 8 64")
        check_value("--ranks (--nproc)", int(text), int, limits)
        numbers.append(int(text))
    return tuple(numbers)


def _check_sizes(flags: dict[str, str | None]) -> None:
    """Raise ConfigError if a flag's value is no number of bytes."""
    for flag, text in flags.items():
        try:
            if text is not None:
                read_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"{flag} {error}") from error


@dataclass(frozen=True, kw_only=True)
class RunPlanArguments(SettingsArguments):
    """Arguments of the plan of a run.

    Attributes:
        ranks: number of ranks; if not given, the fewest that tp, cp, pp, ep and etp allow. With --fit, several numbers
            are allowed.
        rank: show all numbers of this rank, such as each collective with its group, count and bytes, instead of a line
            for each pipeline stage.
        fit: memory of a rank, such as 80GiB or 16GB; lists the layouts that fit, best first, instead of one plan.
        ranks_per_host: ranks on a host; with --fit also the largest tp, because ranks that split layers exchange the
            most data.
        host_bandwidth: bytes per second that a rank sends to a rank of its host, such as 450GB. With --peak-tflops it
            gives an estimate of the step's time.
        network_bandwidth: the same to a rank of another host, such as 50GB.
        picture: PNG or SVG file for a picture of the memory over a step of the rank that needs the most.
        json: print JSON.
    """

    ranks: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--nproc",))] = ()
    rank: Annotated[int | None, _RANK] = None
    fit: str | None = None
    ranks_per_host: Annotated[int, LOCAL_RANKS] = DEFAULT_RANKS_PER_HOST
    host_bandwidth: str | None = None
    network_bandwidth: str | None = None
    picture: Annotated[str | None, Folder()] = None
    json: bool = False

    def _check_together(self) -> None:
        self.world_sizes()
        if self.fit is not None and self.rank is not None:
            raise ConfigError(
                f"--rank {self.rank} is of one layout, and --fit lists layouts; give --rank with the flags of a layout"
            )

    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks to plan for."""
        return _world_sizes(self.ranks, self.fit, RANKS) or (self.settings.parallel.fewest_ranks,)

    @property
    def folder(self) -> str | None:
        """Folder of the model to plan; None for that of the settings."""
        return self.settings.base if isinstance(self.settings, FinetuneSettings) else None

    def begins(self) -> str:
        return f"planning {self.folder or 'the model of the settings'}"

    def check_early(self) -> None:
        if self.folder is not None:
            check_model(self.folder)
        _check_sizes({"--fit": self.fit})
        _check_sizes({"--host-bandwidth": self.host_bandwidth, "--network-bandwidth": self.network_bandwidth})
        if self.picture is not None:
            check_output(self.picture, flag="--picture")

    def workload(self) -> "Workload":
        """Return the run to plan."""
        from shardwise.plan.workload import planned_workload

        return planned_workload(self.settings)

    def rates(self) -> "Rates":
        """Return the stated rates."""
        from shardwise.plan.machine import Rates

        within, between, tflops = self.host_bandwidth, self.network_bandwidth, self.settings.peak_tflops
        return Rates(
            None if tflops is None else tflops * 1e12,
            None if within is None else read_bytes(within),
            None if between is None else read_bytes(between),
            self.ranks_per_host,
        )

    def work(self) -> None:
        from shardwise.plan.picture import draw_memory
        from shardwise.plan.report import plan_as_json, plan_as_table, rank_as_table
        from shardwise.run.pictures import check_picture

        rates, limit = self.rates(), None
        if self.picture is not None:
            check_picture(self.picture)
        workload = self.workload()
        if self.fit is None:
            from shardwise.plan.plan import plan_of

            (world_size,) = self.world_sizes()
            plan = plan_of(workload, world_size, self.rank)
            shown: object = plan_as_json(plan, rates)
            text = plan_as_table(plan, rates) if self.rank is None else rank_as_table(plan, rates)
        else:
            from shardwise.plan.fit import choices_of, fitting_as_table

            limit = read_bytes(self.fit)
            choices = choices_of(workload, self.fit, self.world_sizes(), ranks_per_host=self.ranks_per_host)
            plan, shown = choices[0].plan, [plan_as_json(choice.plan, rates) for choice in choices]
            left = len(choices) - _SHOWN
            more = f"{left} more fit. " if left > 0 else ""
            text = (
                f"{fitting_as_table(choices[:_SHOWN])}\n\n{more}Best first: the least extra work (recomputation, idle "
                "pipeline stages), then the fewest bytes that a rank sends in a step, then memory."
            )
        print(json.dumps(shown, indent=2) if self.json else text)
        if self.picture is not None:
            draw_memory(plan, self.picture, limit=limit)


@dataclass(frozen=True, kw_only=True)
class PlanArguments(RunPlanArguments):
    """Show the memory and traffic of each rank of a run, without starting it.

    Prints the bytes of weights, gradients, optimizer state and activations, and
    the bytes that a rank sends in a step. Each command has its plan, with its
    settings; of folders only config.json is read, and no data is needed:
      shardwise plan finetune MODEL_DIR --tp 8 --lora-rank 16
      shardwise plan dpo MODEL_DIR --tp 8
      shardwise plan generate MODEL_DIR --ranks 8 --fit 80GiB
    Without a command, or with train, the settings are those of shardwise train;
    with MODEL_DIR they train the model of a folder. Examples:
      shardwise plan --config run.toml --ranks 64 --tp 8
      shardwise plan --config run.toml --ranks 1024 --tp 8 --pp 8 --rank 517
      shardwise plan MODEL_DIR --device cuda --ranks 8 --fit 80GiB

    Attributes:
        model_dir: Hugging Face folder with the config.json of the model to plan; the settings' model if not given.
    """

    model_dir: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_DIR")] = None
    settings: Annotated[PlanSettings, tyro.conf.arg(name="")] = field(default_factory=PlanSettings)

    def _check_together(self) -> None:
        super()._check_together()
        if self.model_dir in _KINDS and not Path(self.model_dir).exists():
            raise ConfigError(
                f"there is no folder {self.model_dir}; to plan that command, name it first: shardwise plan "
                f"{self.model_dir} ..."
            )

    @property
    def folder(self) -> str | None:
        return self.model_dir

    def workload(self) -> "Workload":
        from shardwise.plan.workload import planned_workload

        return planned_workload(self.settings, self.model_dir)


@dataclass(frozen=True, kw_only=True)
class FinetunePlanArguments(RunPlanArguments):
    """Show the memory and traffic of each rank of shardwise finetune, without starting it.

    The settings are those of the run. Of the folders of the model and of adapters
    only config.json and adapter_config.json are read; no data is needed. Examples:
      shardwise plan finetune MODEL_DIR --ranks 8 --tp 8 --lora-rank 16 --base-quantization nf4
      shardwise plan finetune MODEL_DIR --device cuda --ranks 8 --fit 80GiB
    """

    settings: Annotated[PlannedFinetuneSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class DpoPlanArguments(RunPlanArguments):
    """Show the memory and traffic of each rank of shardwise dpo, without starting it.

    The settings are those of the run; of folders only config.json is read. A
    sample has two rows, the better and the worse answer. Examples:
      shardwise plan dpo MODEL_DIR --ranks 8 --tp 8
      shardwise plan dpo MODEL_DIR --device cuda --ranks 8 --fit 80GiB
    """

    settings: Annotated[PlannedDpoSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class GeneratePlanArguments(Arguments):
    """Show the memory of each rank that generates text: weights, key-value cache and peaks, and the batch that fits.

    All ranks split the layers of the model. Of the folders of the model and of adapters only config.json and
    adapter_config.json are read.

    Attributes:
        model_dir: Hugging Face folder with the config.json of the model.
        ranks: number of ranks; tp if not given. With --fit, several numbers are allowed.
        tp: number of ranks that split each layer: all of them.
        rank: the rank to show; the one that needs the most if not given.
        fit: memory of a rank, such as 80GiB or 16GB; shows the largest batch that fits.
        batch_size: number of texts that are generated together; not with --fit.
        prompt_length: tokens of each prompt; if not given, 512, or what the model leaves.
        max_new_tokens: tokens to add to each prompt; if not given, 200, or what the model leaves.
        adapter: folder of LoRA adapters, in the peft library's format, to use with the model.
        device: device to compute on; "auto" takes a GPU if there is one.
        layers: kind of layers, as for shardwise generate.
        json: print JSON.
    """

    model_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_DIR"), Folder("")]
    ranks: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--nproc",))] = ()
    tp: Annotated[int | None, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = None
    rank: Annotated[int | None, _RANK] = None
    fit: str | None = None
    batch_size: Annotated[int, BATCH] = 1
    prompt_length: Annotated[int | None, SEQUENCE] = None
    max_new_tokens: Annotated[int | None, NEW_TOKENS] = None
    adapter: Annotated[str | None, Folder()] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"
    json: bool = False

    def _check_together(self) -> None:
        for number in self.world_sizes():
            if self.tp not in (None, number):
                raise ConfigError(
                    f"--tp {self.tp} is not the number of ranks, {number}, and all of them split the layers; leave "
                    "--tp or --ranks out"
                )
        for flag, value in self.changed("rank", "batch_size") if self.fit is not None else ():
            raise ConfigError(f"{flag} {value} with --fit, which finds the largest batch; leave one of them out")

    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks to plan for."""
        return _world_sizes(self.ranks, self.fit, LOCAL_RANKS) or (self.tp or 1,)

    def begins(self) -> str:
        return f"planning {self.model_dir}"

    def check_early(self) -> None:
        check_model(self.model_dir)
        if self.adapter is not None:
            check_model(self.adapter)
        _check_sizes({"--fit": self.fit})

    def work(self) -> None:
        from shardwise.plan.generation import fit_generation, plan_generation
        from shardwise.plan.report import generation_as_json, generation_as_table

        names = ("prompt_length", "max_new_tokens", "adapter", "device", "layers")
        given = {name: getattr(self, name) for name in names}
        if self.fit is None:
            (ranks,) = self.world_sizes()
            plan = plan_generation(self.model_dir, ranks=ranks, rank=self.rank, batch_size=self.batch_size, **given)
            shown: object = generation_as_json(plan)
            text = generation_as_table([plan])
        else:
            plans = fit_generation(self.fit, self.model_dir, ranks=self.world_sizes(), **given)
            shown, text = [generation_as_json(plan) for plan in plans], generation_as_table(plans)
        print(json.dumps(shown, indent=2) if self.json else text)
