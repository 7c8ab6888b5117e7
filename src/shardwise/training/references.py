"""What general-purpose compressors need for the same bytes: something to hold a model against."""

from __future__ import annotations

import lzma
import zlib

# A compressor's time grows with the text; beyond this, the comparison is not worth the wait.
_MOST_BYTES = 16 << 20


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Bits per byte of ``zlib -9`` and ``lzma`` (preset 9) on ``content``; nothing for a very large one."""
    if not content or len(content) > _MOST_BYTES:
        return {}
    return {
        "zlib -9": 8 * len(zlib.compress(content, 9)) / len(content),
        "lzma": 8 * len(lzma.compress(content, preset=9)) / len(content),
    }
