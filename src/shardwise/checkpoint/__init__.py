"""Sharded checkpoints: safetensors and JSON only, complete or absent, from any layout to any layout."""

from shardwise.checkpoint.checkpoint import load, read_meta, save, verify
from shardwise.checkpoint.folder import latest
from shardwise.checkpoint.tensor_shard import TensorShard

__all__ = ["TensorShard", "latest", "load", "read_meta", "save", "verify"]
