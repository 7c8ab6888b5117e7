"""Gradients in contiguous buffers, summed over data-parallel ranks in buckets while the backward goes on."""

from shardwise.training.gradients.bucket import DEFAULT_BUCKET_SIZE as DEFAULT_BUCKET_SIZE
from shardwise.training.gradients.bucket import Bucket as Bucket
from shardwise.training.gradients.gradient_buffers import GradientBuffers as GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees as GradientTrees
from shardwise.training.gradients.parameter_buffers import Division as Division
from shardwise.training.gradients.parameter_buffers import ParameterBuffers as ParameterBuffers
from shardwise.training.gradients.parameter_buffers import Share as Share
