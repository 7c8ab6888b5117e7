"""Gradients in contiguous buffers, summed over data-parallel ranks in buckets while the backward goes on."""

from shardwise.data_parallel.gradient_buffers import DEFAULT_BUCKET_SIZE, Bucket, GradientBuffers

__all__ = ["DEFAULT_BUCKET_SIZE", "Bucket", "GradientBuffers"]
