"""Gradients of a step: one protocol with implementations by buffers, by trees and by full sharding."""

from shardwise.training.gradients.base import (
    DEFAULT_BUCKET_SIZE as DEFAULT_BUCKET_SIZE,
    Bucket as Bucket,
    Gradients as Gradients,
    Total as Total,
    default_bucket_size as default_bucket_size,
)
from shardwise.training.gradients.gradient_buffers import GradientBuffers as GradientBuffers
from shardwise.training.gradients.gradient_trees import GradientTrees as GradientTrees
from shardwise.training.gradients.parameter_buffers import (
    Division as Division,
    ParameterBuffers as ParameterBuffers,
    Share as Share,
)
