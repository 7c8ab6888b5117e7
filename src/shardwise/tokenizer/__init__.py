"""Text to token ids and back: what data, Hugging Face folders and generation share."""

from shardwise.tokenizer.chat_template import ChatTemplate as ChatTemplate
from shardwise.tokenizer.tokenizer import END_OF_TEXT as END_OF_TEXT
from shardwise.tokenizer.tokenizer import PaddedTokenizer as PaddedTokenizer
from shardwise.tokenizer.tokenizer import TextSource as TextSource
from shardwise.tokenizer.tokenizer import Tokenizer as Tokenizer
