"""Pipeline parallelism: schedules as tables, and the stage that runs one."""

from shardwise.pipeline_parallel.actions import Action as Action
from shardwise.pipeline_parallel.actions import Kind as Kind
from shardwise.pipeline_parallel.actions import Schedule as Schedule
from shardwise.pipeline_parallel.schedules import SCHEDULE_NAMES as SCHEDULE_NAMES
from shardwise.pipeline_parallel.schedules import forward_only as forward_only
from shardwise.pipeline_parallel.schedules import make_schedule as make_schedule
from shardwise.pipeline_parallel.stage import Pipeline as Pipeline
