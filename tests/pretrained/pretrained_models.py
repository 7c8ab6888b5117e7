"""Where the fetched models are, and what is asked of them."""

from __future__ import annotations

import os

FETCHED = os.environ.get("SHARDWISE_PRETRAINED")
SHORT, LONG = 48, 1024
NEW_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Write a sentence about the sea.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Is the sun a star?",
    "Finish the list: Monday, Tuesday,",
    "Say hello.",
)
