"""The commands that only report: ``plan``, ``compare`` and ``env``."""

import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from shardwise.cli.arguments import Arguments, SettingsArguments
from shardwise.core.errors import ConfigError
from shardwise.run.settings import PlanSettings
from shardwise.training.bounds import DEFAULT_RANKS_PER_HOST, LOCAL_RANKS, RANKS, Folder, check_value

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class PlanArguments(SettingsArguments):
    """Show the memory and traffic of each rank of a run, without starting it.

    Prints the bytes of weights, gradients, optimizer state and activations, and
    the bytes that a rank sends in a step. The settings are those of shardwise
    train. The model may also be a Hugging Face folder; only its config.json is
    read. Examples:
      shardwise plan --config run.toml --ranks 64 --tp 8
      shardwise plan MODEL_DIR --device cuda --ranks 8 --fit 80GiB

    Attributes:
        model_dir: Hugging Face folder with the config.json of the model to plan; the settings' model if not given.
        ranks: number of ranks; tp x pp if not given. With --fit, several numbers are allowed.
        fit: memory of a rank, such as 80GiB or 16GB; lists the layouts that fit, best first, instead of one plan.
        ranks_per_host: with --fit, the largest tp, because ranks that split layers exchange the most data.
        json: print JSON.
    """

    model_dir: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_DIR")] = None
    ranks: tuple[str, ...] = ()
    fit: str | None = None
    ranks_per_host: Annotated[int, LOCAL_RANKS] = DEFAULT_RANKS_PER_HOST
    json: bool = False
    settings: Annotated[PlanSettings, tyro.conf.arg(name="")] = field(default_factory=PlanSettings)

    def _check_together(self) -> None:
        if self.fit is None and len(self.ranks) > 1:
            raise ConfigError(f"--ranks has {len(self.ranks)} numbers; several go with --fit only")
        self.world_sizes()

    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks to plan for."""
        parallel = self.settings.parallel
        if not self.ranks:
            return (parallel.tp * parallel.pp,)
        numbers = []
        for text in self.ranks:
            if not text.isdecimal() or len(text) > 9:
                raise ConfigError(f"--ranks {text!r} is not a number of ranks; give integers such as 8 64")
            check_value("--ranks", int(text), int, RANKS)
            numbers.append(int(text))
        return tuple(numbers)

    def work(self) -> None:
        from shardwise.run.plan.report import plan_as_json, plan_as_table

        if self.fit is None:
            from shardwise.run.plan.plan import plan_of

            (world_size,) = self.world_sizes()
            plan = plan_of(self.settings, self.model_dir, world_size)
            print(json.dumps(plan_as_json(plan), indent=2) if self.json else plan_as_table(plan))
            return
        from shardwise.run.plan.fit import choices_of, fitting_as_table

        choices = choices_of(
            self.settings, self.model_dir, self.fit, self.world_sizes(), ranks_per_host=self.ranks_per_host
        )
        if self.json:
            print(json.dumps([plan_as_json(choice.plan) for choice in choices], indent=2))
            return
        print(fitting_as_table(choices[:_SHOWN]))
        left = len(choices) - _SHOWN
        more = f"{left} more fit. " if left > 0 else ""
        print(
            f"\n{more}Best first: the least extra work (recomputation, idle pipeline stages), then the fewest bytes "
            "that a rank sends in a step, then memory."
        )


@dataclass(frozen=True)
class CompareArguments(Arguments):
    """Show where two runs diverge: the first step, tensor and element in which their metrics or checkpoints differ.

    The runs may have different layouts. The exit code is 0 if both runs have the same results for the same steps, and
    their checkpoints of common steps are bit-identical; otherwise it is 1.

    Attributes:
        run_a: --out folder of a training run, or one of its checkpoints.
        run_b: the same for the other run.
    """

    run_a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A"), Folder("")]
    run_b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B"), Folder("")]

    def work(self) -> None:
        from shardwise.run import compare

        same, lines = compare(self.run_a, self.run_b)
        print("\n".join(lines))
        if not same:
            raise SystemExit(1)


@dataclass(frozen=True)
class EnvArguments(Arguments):
    """Show versions, devices, backends, and which fast paths are on and why not.

    Attributes:
        json: print JSON, for a bug report or a script.
        debug: show stack traces.
    """

    json: bool = False

    def work(self) -> None:
        from shardwise.cli.machine import as_table, gather

        report = gather()
        print(json.dumps(report, indent=2) if self.json else as_table(report))
