"""What the files beside a ``tokenizer.json`` add to it: which tokens there are besides, and which of them are special.

``transformers`` reads them so: ``added_tokens_decoder`` of ``tokenizer_config.json`` replaces what ``tokenizer.json``
says of a token. Where it is missing, ``special_tokens_map.json`` and ``added_tokens.json`` count. Every token with a
role (``eos_token``, ``image_token``, ``extra_special_tokens``) that is no added token yet becomes a special one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from shardwise.core.errors import DataError
from shardwise.core.json_files import read_json

CONFIG_NAME = "tokenizer_config.json"

_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
# Names that the vocabulary lacks get new ids in this order; other roles follow.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class DeclaredTokens:
    """What the files in a tokenizer's folder say of its tokens.

    Args:
        folder: the folder of the ``tokenizer.json``; each of the files may be missing.

    Raises:
        DataError: a file that is not JSON, or a token in it that cannot be one. The message names file and field.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CONFIG_NAME
        self._config = _read_object(self._path)
        self._named: dict[str, AddedToken] = {}
        self._extra: list[AddedToken] = []
        self._added: dict[str, int] = {}
        self._take_roles(self._config, self._path)
        if _DECODER not in self._config:
            path = folder / "special_tokens_map.json"
            self._take_roles(_read_object(path), path)
            path = folder / "added_tokens.json"
            for name, token_id in _read_object(path).items():
                if not isinstance(token_id, int):
                    raise _bad_token(path, name, token_id)
                self._added[name] = token_id

    @property
    def eos_token(self) -> str | None:
        """Name of the token that ends a text; None if no file says."""
        token = self._named.get("eos_token")
        return None if token is None else str(token.content)

    @property
    def names(self) -> dict[str, str]:
        """The name of each token with a role, such as ``bos_token``."""
        return {role: str(token.content) for role, token in self._named.items()}

    def declare_(self, backend: tokenizers.Tokenizer) -> None:
        """Tell the library's tokenizer of them, in place; names that its vocabulary lacks get new ids behind it."""
        known: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        roles = {str(token.content) for token in self._named.values()}
        special = roles | {str(token.content) for token in self._extra}
        if _DECODER in self._config:
            decoder = dict(self._decoder())
        else:
            decoder = {
                token_id: AddedToken(name, normalized=name not in special, special=name in special)
                for name, token_id in self._added.items()
            } | known
        tokens = [decoder[token_id] for token_id in sorted(decoder)]
        names = {str(token.content) for token in [*known.values(), *tokens]}
        named = [self._named[role] for role in _ROLES if role in self._named]
        named += [token for role, token in self._named.items() if role not in _ROLES]
        for token in (*named, *self._extra):
            if token.content not in names:
                names.add(str(token.content))
                tokens.append(token)
        for token in tokens:
            if token.content in roles:
                token.special = True
        backend.add_tokens(tokens)

    def _take_roles(self, values: Mapping[str, Any], path: Path) -> None:
        for role, value in values.items():
            if role in _EXTRA:
                if isinstance(value, Mapping):
                    self._named |= {name: _token_of(token, path, name) for name, token in value.items()}
                elif isinstance(value, list):
                    self._extra += [_token_of(token, path, role) for token in value]
                elif value is not None:
                    raise _bad_token(path, role, value)
            elif role.endswith("_token") and isinstance(value, str | Mapping) and value:
                self._named[role] = _token_of(value, path, role)

    def _decoder(self) -> Iterator[tuple[int, AddedToken]]:
        values = self._config[_DECODER]
        if not isinstance(values, Mapping):
            raise _bad_token(self._path, _DECODER, values)
        for token_id, value in values.items():
            if not (token_id.isdecimal() and isinstance(value, Mapping)):
                raise _bad_token(self._path, f"{_DECODER} {token_id!r}", value)
            yield int(token_id[:20]), _token_of(value, self._path, f"{_DECODER} {token_id!r}", special=False)


def _token_of(value: object, path: Path, role: str, *, special: bool = True) -> AddedToken:
    """A token from its name, or from an object that has it as ``content``, special unless the object says otherwise."""
    fields = value if isinstance(value, Mapping) else {"content": value}
    content = fields.get("content")
    options = {name: fields[name] for name in _FIELDS if name in fields}
    if not (isinstance(content, str) and content and all(isinstance(option, bool) for option in options.values())):
        raise _bad_token(path, role, value)
    try:
        return AddedToken(content, **({"special": special} | options))
    except (TypeError, ValueError) as error:
        # The library rejects lone surrogates.
        raise _bad_token(path, role, value) from error


def _bad_token(path: Path, role: str, value: object) -> DataError:
    return DataError(f"{str(path)!r}: {role} is {str(value)[:80]!r}, which is no token; repair or remove the entry")


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {str(path)!r}: {reason}; repair or remove it") from error
