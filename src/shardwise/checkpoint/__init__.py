"""Sharded checkpoints: safetensors and JSON only, complete or absent, from any layout to any layout."""

from shardwise.checkpoint.checkpoint import load, read_meta, save, verify
from shardwise.checkpoint.folder import latest
from shardwise.sharding import ParamShard

__all__ = ["ParamShard", "latest", "load", "read_meta", "save", "verify"]
