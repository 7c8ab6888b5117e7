"""Sharded checkpoints in safetensors and JSON, which are never incomplete and load at any layout."""

from shardwise.core.sharding import ParamShard as ParamShard
from shardwise.storage.checkpoint.checkpoint import load as load, read_meta as read_meta, verify as verify
from shardwise.storage.checkpoint.folder import latest as latest
from shardwise.storage.checkpoint.saving import PendingSave as PendingSave, Snapshot as Snapshot, save as save
