"""The command ``doctor``: compare two recordings, or a run with the same run on one rank."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardwise.cli.arguments import Arguments, LaunchArguments, RunArguments
from shardwise.core.atomic_files import check_output
from shardwise.core.errors import DataError
from shardwise.core.folder_lock import check_free
from shardwise.run.settings import DpoSettings, FinetuneSettings, Settings
from shardwise.training.bounds import Folder, Range, with_values

if TYPE_CHECKING:
    from shardwise.doctor.diagnosis import Diagnosis

_STEPS = Range(1, 1000)


def _show(diagnosis: "Diagnosis", *, html: str | None, as_json: bool, title: str) -> None:
    from shardwise.doctor.report import as_json as facts_of, as_text, write_page

    print(json.dumps(facts_of(diagnosis), indent=2) if as_json else as_text(diagnosis))
    if html is not None:
        write_page(diagnosis, html, title=title, flag="--html")


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(Arguments):
    """Name the first wrong module of a parallel run, from recordings of it and of the same run on one rank.

    In any training script, shardwise.doctor.record records a run; see docs/doctor.md. After the word train,
    finetune or dpo, both runs are made and compared; the flags are those of that command. With --explain, a
    page shows what tensor parallelism does to a small model. The exit code is 0 if all differences are rounding, 1 if
    a module is wrong, and 2 if the recordings cannot be compared. Examples:
      shardwise doctor recordings/one recordings/parallel --html report.html
      shardwise doctor train --data FOLDER --tp 2 --sequence-parallel
      shardwise doctor --explain

    Attributes:
        reference: recording of one rank, or of several ranks at the suspect's layout.
        suspect: recording of the parallel run.
        rounding: recording of the reference's run that differs in rounding alone, such as one in another dtype or one
            that was made with perturb=1; without it the expected rounding is estimated.
        html: file for a page with all modules.
        json: print JSON.
    """

    reference: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REFERENCE"), Folder("")]
    suspect: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUSPECT"), Folder("")]
    rounding: Annotated[str | None, Folder()] = None
    html: Annotated[str | None, Folder()] = None
    json: bool = False

    def begins(self) -> str:
        return f"comparing {self.suspect} with {self.reference}"

    def check_early(self) -> None:
        for folder in (self.reference, self.suspect, self.rounding):
            if folder is not None and not os.path.exists(folder):
                raise DataError(f"{folder} has no recording; shardwise.doctor.record writes one")
        if self.html is not None:
            check_output(self.html, flag="--html")

    def work(self) -> None:
        from shardwise.doctor.diagnosis import diagnose

        diagnosis = diagnose(self.reference, self.suspect, self.rounding)
        _show(diagnosis, html=self.html, as_json=self.json, title=f"{self.suspect} against {self.reference}")
        if not diagnosis.is_sound:
            raise SystemExit(1)


@dataclass(frozen=True, kw_only=True)
class _DoctorRunArguments(RunArguments):
    """Arguments of the diagnosis of a run.

    Attributes:
        recorded_steps: number of steps to record.
        html: file for a page with all modules.
        json: print JSON.
    """

    recorded_steps: Annotated[int, _STEPS] = 2
    html: Annotated[str | None, Folder()] = None
    json: bool = False

    def check_early(self) -> None:
        check_free(Path(self.settings.out))
        self.check_inputs()
        if self.html is not None:
            check_output(self.html, flag="--html")

    def work(self) -> Callable[[], object] | None:
        return self._diagnose

    def _diagnose(self) -> None:
        from shardwise.doctor.runs import diagnose_run

        title = f"{Path(self.settings.out).name} against one rank"
        report = partial(_show, html=self.html, as_json=self.json, title=title)
        diagnose_run(self.settings, steps=self.recorded_steps, report=report)


@dataclass(frozen=True, kw_only=True)
class DoctorTrainArguments(_DoctorRunArguments):
    """Name the first wrong module of shardwise train at a layout, by the same steps on one rank.

    The first rank also trains the model alone, and with another rounding. The
    recordings are left in OUT/doctor. Other flags are those of shardwise train.
    Example:
      shardwise doctor train --data FOLDER --tp 2 --sequence-parallel
    """

    settings: Annotated[Settings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class DoctorFinetuneArguments(_DoctorRunArguments):
    """Name the first wrong module of shardwise finetune at a layout, by the same steps on one rank.

    The first rank also trains the model alone, and with another rounding. The
    recordings are left in OUT/doctor. Other flags are those of shardwise finetune.
    Example:
      shardwise doctor finetune MODEL_DIR --data chats.jsonl --tp 2 --lora-rank 8
    """

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class DoctorDpoArguments(_DoctorRunArguments):
    """Name the first wrong module of shardwise dpo at a layout, by the same steps on one rank.

    The first rank also trains the model alone, and with another rounding. The
    recordings are left in OUT/doctor. Other flags are those of shardwise dpo.
    Example:
      shardwise doctor dpo MODEL_DIR --data pairs.jsonl --tp 2
    """

    settings: Annotated[DpoSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class DoctorExplainArguments(LaunchArguments):
    """Write a page that shows tensor parallelism in a small model: each module's tensors, layouts, moves and bytes.

    Attributes:
        out: folder for the page and the recordings.
    """

    out: Annotated[str, Folder()] = "runs/explained"

    @property
    def num_ranks(self) -> int:
        return 2

    def check_world(self, world_size: int) -> None:
        _explained(self).check_world(world_size)

    def check_early(self) -> None:
        check_free(Path(self.out))
        check_output(Path(self.out) / "explained.html", flag="--out")

    def work(self) -> Callable[[], object] | None:
        return self._explain

    def _explain(self) -> None:
        from shardwise.doctor.report import write_page
        from shardwise.doctor.runs import diagnose_run

        path = Path(self.out) / "explained.html"

        def report(diagnosis: "Diagnosis") -> None:
            write_page(diagnosis, path, title="A Llama of two layers on two ranks", flag="--out", explains=True)
            print(f"wrote {path}: open it in a browser")

        diagnose_run(_explained(self), steps=1, report=report)


def _explained(arguments: DoctorExplainArguments) -> Settings:
    import shardwise.doctor.recorder

    values: dict[str, Any] = {
        # Any text does.
        "data": (shardwise.doctor.recorder.__file__,),
        "out": arguments.out,
        "device": "cpu",
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 32, "vocab_size": 300},
        "parallel": {"tp": 2, "sequence_parallel": True},
        "training": {"steps": 1, "global_batch_size": 2},
    }
    return with_values(Settings, values)
