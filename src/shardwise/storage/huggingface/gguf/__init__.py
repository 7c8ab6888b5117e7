"""GGUF files, llama.cpp's format, read as Hugging Face folders."""
