"""Pipeline parallelism: schedules as tables, and the stage that runs one."""

from shardwise.pipeline_parallel.actions import Action, Kind, Schedule
from shardwise.pipeline_parallel.schedules import SCHEDULE_NAMES, forward_only, make_schedule
from shardwise.pipeline_parallel.stage import Pipeline

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Kind",
    "Pipeline",
    "Schedule",
    "forward_only",
    "make_schedule",
]
