"""Pipeline parallelism: schedules as tables, and the stage that runs one."""

from shardwise.training.pipeline.schedules import (
    SCHEDULE_NAMES as SCHEDULE_NAMES,
    Action as Action,
    Kind as Kind,
    Schedule as Schedule,
    forward_only as forward_only,
    make_schedule as make_schedule,
)
from shardwise.training.pipeline.stage import Pipeline as Pipeline
