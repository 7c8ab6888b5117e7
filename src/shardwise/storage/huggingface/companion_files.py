"""The files beside a model's weights: of its tokenizer, its processors and its generation, its licence and readme."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
)
"""What is copied where it is there, beside licences and the readme."""

README_NAME = "README.md"
BASE_README_NAME = "BASE_README.md"
"""As which a model's readme stands beside the card of what was trained from it."""

_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
_TEXTS = ("", ".md", ".txt", ".rst", ".html", ".pdf")
# No licence and no readme is as large: such a file is something else under that name.
_LARGEST_TEXT = 16 << 20


def companion_files(folder: Path, *, beside_card: bool = False) -> Iterator[tuple[Path, str]]:
    """The files to copy from a model's folder, and the name of each copy; symbolic links are followed.

    Args:
        folder: of the model.
        beside_card: the copies will stand beside a card of another model, so that the readme is ``BASE_README.md``.
    """
    for name in COMPANION_FILES:
        if (folder / name).is_file():
            yield folder / name, name
    for path in sorted(folder.iterdir()):
        is_licence = path.stem.upper().startswith(_LICENCES) and path.suffix.lower() in _TEXTS
        is_readme = path.name in (README_NAME, BASE_README_NAME)
        if (is_licence or is_readme) and path.is_file() and path.stat().st_size <= _LARGEST_TEXT:
            if path.name == README_NAME and beside_card:
                yield path, BASE_README_NAME
            elif path.name != BASE_README_NAME or not (beside_card and (folder / README_NAME).is_file()):
                yield path, path.name


def copy_companion_files(source: Path, target: Path, *, beside_card: bool = False) -> None:
    """Copy ``companion_files`` into a folder.

    Raises:
        OSError: one cannot be read or written.
    """
    for path, name in companion_files(source, beside_card=beside_card):
        # Never onto itself, where a link leads back.
        if not (target / name).exists() or not os.path.samefile(path, target / name):
            shutil.copyfile(path, target / name)
