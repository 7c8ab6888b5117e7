"""Where the fetched models are, and what is asked of them."""

from __future__ import annotations

import os

FETCHED = os.environ.get("SHARDWISE_PRETRAINED")
SHORT, LONG = 48, 1024
