"""Sharded checkpoints: safetensors and JSON only, complete or absent, from any layout to any layout."""

from shardwise.core.sharding import ParamShard as ParamShard
from shardwise.storage.checkpoint.checkpoint import load as load
from shardwise.storage.checkpoint.checkpoint import read_meta as read_meta
from shardwise.storage.checkpoint.checkpoint import verify as verify
from shardwise.storage.checkpoint.folder import latest as latest
from shardwise.storage.checkpoint.saving import PendingSave as PendingSave
from shardwise.storage.checkpoint.saving import Snapshot as Snapshot
from shardwise.storage.checkpoint.saving import save as save
