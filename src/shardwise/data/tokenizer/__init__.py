"""Text to token ids and back: what data, Hugging Face folders and generation share."""

from shardwise.data.tokenizer.chat_template import ChatTemplate as ChatTemplate
from shardwise.data.tokenizer.streaming import TextStream as TextStream
from shardwise.data.tokenizer.tokenizer import (
    END_OF_TEXT as END_OF_TEXT,
    PaddedTokenizer as PaddedTokenizer,
    TextSource as TextSource,
    Tokenizer as Tokenizer,
)
