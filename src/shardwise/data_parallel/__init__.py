"""Gradients in contiguous buffers, summed over data-parallel ranks in buckets while the backward goes on."""

from shardwise.data_parallel.bucket import DEFAULT_BUCKET_SIZE as DEFAULT_BUCKET_SIZE
from shardwise.data_parallel.bucket import Bucket as Bucket
from shardwise.data_parallel.gradient_buffers import GradientBuffers as GradientBuffers
from shardwise.data_parallel.gradient_trees import GradientTrees as GradientTrees
from shardwise.data_parallel.parameter_buffers import Division as Division
from shardwise.data_parallel.parameter_buffers import ParameterBuffers as ParameterBuffers
from shardwise.data_parallel.parameter_buffers import Share as Share
