"""Text to token ids and back: what data, Hugging Face folders and generation share."""

from shardwise.tokenizer.tokenizer import END_OF_TEXT, PaddedTokenizer, TextSource, Tokenizer

__all__ = ["END_OF_TEXT", "PaddedTokenizer", "TextSource", "Tokenizer"]
