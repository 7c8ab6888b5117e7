"""Text to token ids and back: what data, Hugging Face folders and generation share."""

from shardwise.data.tokenizer.chat_template import ChatTemplate as ChatTemplate
from shardwise.data.tokenizer.streaming import TextStream as TextStream
from shardwise.data.tokenizer.tokenizer import END_OF_TEXT as END_OF_TEXT
from shardwise.data.tokenizer.tokenizer import PaddedTokenizer as PaddedTokenizer
from shardwise.data.tokenizer.tokenizer import TextSource as TextSource
from shardwise.data.tokenizer.tokenizer import Tokenizer as Tokenizer
