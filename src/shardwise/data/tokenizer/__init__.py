"""Conversion between text and token ids, for data, Hugging Face folders and generation."""

from shardwise.data.tokenizer.chat_template import ChatTemplate as ChatTemplate
from shardwise.data.tokenizer.streaming import StoppableText as StoppableText, TextStream as TextStream
from shardwise.data.tokenizer.tokenizer import (
    END_OF_TEXT as END_OF_TEXT,
    PaddedTokenizer as PaddedTokenizer,
    TextSource as TextSource,
    Tokenizer as Tokenizer,
)
