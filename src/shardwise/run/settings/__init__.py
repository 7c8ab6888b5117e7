"""Settings of training and fine-tuning runs, of adapters and preferences, and of plans."""

from shardwise.run.settings.finetune_settings import (
    DpoSettings as DpoSettings,
    FinetuneOptimizerSettings as FinetuneOptimizerSettings,
    FinetuneSettings as FinetuneSettings,
    LoraSettings as LoraSettings,
    PreferenceSettings as PreferenceSettings,
    PretrainedSettings as PretrainedSettings,
    SampleSettings as SampleSettings,
)
from shardwise.run.settings.plan_settings import (
    PLANNED as PLANNED,
    PlannedDpoSettings as PlannedDpoSettings,
    PlannedFinetuneSettings as PlannedFinetuneSettings,
    PlanSettings as PlanSettings,
)
from shardwise.run.settings.run_settings import (
    CorpusSettings as CorpusSettings,
    ModelSettings as ModelSettings,
    ProfileSettings as ProfileSettings,
    RecomputeSettings as RecomputeSettings,
    RunSettings as RunSettings,
    Settings as Settings,
    TrackerName as TrackerName,
)
from shardwise.training.step_settings import (
    OptimizerSettings as OptimizerSettings,
    ParallelSettings as ParallelSettings,
    TrainingSettings as TrainingSettings,
)
