"""Pipeline parallelism: schedules as tables, and the stage that runs one."""

from shardwise.training.pipeline.actions import Action as Action
from shardwise.training.pipeline.actions import Kind as Kind
from shardwise.training.pipeline.actions import Schedule as Schedule
from shardwise.training.pipeline.schedules import SCHEDULE_NAMES as SCHEDULE_NAMES
from shardwise.training.pipeline.schedules import forward_only as forward_only
from shardwise.training.pipeline.schedules import make_schedule as make_schedule
from shardwise.training.pipeline.stage import Pipeline as Pipeline
