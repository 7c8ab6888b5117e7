"""Gradients in contiguous buffers, summed over data-parallel ranks in buckets while the backward goes on."""

from shardwise.training.gradients.bucket import DEFAULT_BUCKET_SIZE as DEFAULT_BUCKET_SIZE, Bucket as Bucket
from shardwise.training.gradients.gradient_buffers import GradientBuffers as GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees as GradientTrees
from shardwise.training.gradients.gradients import Gradients as Gradients, Total as Total
from shardwise.training.gradients.parameter_buffers import (
    Division as Division,
    ParameterBuffers as ParameterBuffers,
    Share as Share,
)
