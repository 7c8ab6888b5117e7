"""Sharded checkpoints: safetensors and JSON only, complete or absent, from any layout to any layout."""

from shardwise.checkpoint.checkpoint import load as load
from shardwise.checkpoint.checkpoint import read_meta as read_meta
from shardwise.checkpoint.checkpoint import verify as verify
from shardwise.checkpoint.folder import latest as latest
from shardwise.checkpoint.saving import PendingSave as PendingSave
from shardwise.checkpoint.saving import save as save
from shardwise.checkpoint.snapshot import Snapshot as Snapshot
from shardwise.sharding import ParamShard as ParamShard
