"""GGUF files: the weights and tokenizers that transformers reads, commands that take them, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import MODELS, tiny_model, write_gguf
from harness.parity import assert_bit_equal
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.storage.huggingface.gguf import header
from shardwise.storage.huggingface.gguf.folder import GgufFolder
from shardwise.storage.huggingface.gguf.tokenizer import _made
from shardwise.storage.huggingface.pretrained import PretrainedFolder, read_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_KINDS = dict(zip(MODELS, ("Q8_0", "Q4_0", "F16", "BF16", "Q5_1", "Q8_0", "Q4_1", "F32"), strict=True))


def whole(folder: GgufFolder, name: str) -> torch.Tensor:
    shape = folder.tensors[name].shape
    return folder.read(name, [0] * len(shape), shape)


@pytest.mark.parametrize("architecture", MODELS)
def test_weights_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    import transformers

    path = write_gguf(tmp_path / "model.gguf", architecture, kind=_KINDS[architecture])
    # transformers does not read the widths of experts, and takes Phi-3's own padding id.
    own: dict[str, Any] = (
        {"config": tiny_model(architecture).config} if "moe" in architecture or architecture == "phi3" else {}
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, **own
    )
    expected = theirs.state_dict()
    opened = PretrainedFolder(path)
    assert opened.dtype == torch.float32
    assert opened.description.differences(read_config(path).description) == {}
    folder = opened.tensors
    assert isinstance(folder, GgufFolder)
    for name in folder.tensors:
        value = whole(folder, name)
        if ".experts." in name:
            stem, index, kind, _ = name.rsplit(".", 3)
            fused = expected[f"{stem}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(index)]
            wanted = fused if kind == "down_proj" else fused.chunk(2)[kind == "up_proj"]
        else:
            wanted = expected[name]
        assert_bit_equal(value, wanted.contiguous(), name=name)
    num_read = sum(each.num_bytes > 0 for each in folder.tensors.values())
    num_experts = 3 if "moe" in architecture else 0
    assert num_read == len(expected) - theirs.config.tie_word_embeddings + 2 * max(0, 3 * num_experts - 2)


def test_a_box_of_a_tensor(tmp_path: Path) -> None:
    """Also of queries and keys, whose rows change places within a head, and across heads."""
    folder = PretrainedFolder(write_gguf(tmp_path / "model.gguf", "llama", kind="Q8_0")).tensors
    assert isinstance(folder, GgufFolder)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        values = whole(folder, name)
        for first, count, start, width in ((0, 7, 0, 64), (13, 22, 5, 17), (40, 24, 63, 1), (5, 0, 0, 64)):
            assert torch.equal(
                folder.read(name, (first, start), (count, width)), values[first:][:count, start:][:, :width]
            )
    norm = whole(folder, "model.norm.weight")
    assert torch.equal(folder.read("model.norm.weight", (3,), (9,)), norm[3:12])
    before = folder.bytes_read
    folder.read("lm_head.weight", (10, 0), (2, 64))
    assert folder.bytes_read - before == 2 * 2 * 34


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Llama of two layers with a tokenizer and a chat template."""
    tokenizer = Tokenizer.train(["a text, and another text 123\n"] * 9, 280)
    return write_gguf(tmp_path / "tiny.gguf", "llama", kind="Q8_0", tokenizer=tokenizer)


def test_commands_take_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported and exported again, it has the same bits; adapters trained on it name it, and generate finds it."""
    import transformers

    assert main(["import-hf", str(file), "--out", str(tmp_path / "imported")]) == 0
    assert main(["export-hf", str(tmp_path / "imported"), "--out", str(tmp_path / "back")]) == 0
    folder = GgufFolder(file)
    for name, value in load_file(tmp_path / "back/model.safetensors").items():
        assert_bit_equal(value, whole(folder, name), name=name)
    text = "Another text: 4567 times, it's a\n\n  text é 🙂<|endoftext|>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for each in (folder.folder, tmp_path / "back"):
        tokenizer = Tokenizer.load(each)
        assert tokenizer.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False)
        template = ChatTemplate.load(each)
        assert template is not None
        messages = [{"role": "user", "content": "a"}]
        assert template.render(messages).text == theirs.apply_chat_template(messages, tokenize=False)
    (tmp_path / "texts.txt").write_text("a text, and another text\n" * 20)
    out = ["--out", str(tmp_path / "adapters"), "--steps", "1", "--batch-size", "1", "--lora-rank", "2"]
    length = ["--model.sequence-length", "16"]
    assert main(["finetune", str(file), "--data", str(tmp_path / "texts.txt"), *out, *length]) == 0
    assert 'base_model: "tiny"' in (tmp_path / "adapters/README.md").read_text()
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "adapters"), "--prompt", "a text", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("a text")
    assert main(["plan", "finetune", str(file), "--data", str(tmp_path / "texts.txt"), *length]) == 0


def test_sentencepiece_tokens_are_those_of_transformers() -> None:
    """Merges follow from the tokens and their scores; blanks, bytes and names of special tokens as in Llama 2."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdet,."]
    tokens += ["▁a", "▁b", "ab", "cd", "▁ab", "abcd", "▁abcd", "at", "te", "ate", "▁▁", "▁cd"]
    # Not in the order of the tokens: "at" is merged before "▁a".
    base = {"tokens": tokens, "scores": [float(number) for number in range(len(tokens))], "unknown_token_id": 0}
    base |= {"bos_token_id": 1, "eos_token_id": 2, "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]}
    for architecture in ("phi3", "gemma2"):
        theirs, _ = convert_gguf_tokenizer(architecture, {"tokenizer_type": "llama", **base, "unk_token_id": 0})
        mine, names = _made({"model": "llama", **base}, architecture)
        for text in ("abcd ate at  abcd", " a cd\u00e9 ab.", "<s>abate</s> b", ""):
            expected = theirs.encode(text, add_special_tokens=False)
            ids = mine.encode(text, add_special_tokens=False).ids
            assert ids == expected.ids, (architecture, text)
            assert mine.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        assert mine.encode("ab").ids[0] == 1
        assert names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        # Tokens of users, and those with a role whatever their type, are found in texts.
        types = [2, 3, 1, *base["token_type"][3:], 4]
        own = base | {"tokens": [*tokens, "d,"], "scores": [*base["scores"], -1000.0], "token_type": types}
        own |= {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": architecture == "gemma2"}
        made, _ = _made({"model": "llama", **own}, architecture)
        ids = made.encode("abcd,</s>").ids
        assert ids[-3:] == [len(tokens), 2, 2]
        assert 1 not in ids
        assert tokens[made.encode("ab").ids[0]] == ("▁ab" if architecture == "gemma2" else "ab")


def test_tokens_of_bytes_follow_their_rule() -> None:
    """Llama 3 takes a word that is a token without merges, and Qwen composes characters."""
    base = {"model": "gpt2", "tokens": [*sorted(ByteLevel.alphabet()), "ab"], "merges": []}
    made = {pre: _made({**base, "pre": pre}, "llama")[0] for pre in ("gpt-2", "llama-bpe", "qwen2")}
    for pre, backend in made.items():
        assert (backend.encode("ab").ids == [256]) == (pre == "llama-bpe")
        assert (backend.encode("e\u0301").ids == backend.encode("\u00e9").ids) == (pre == "qwen2")
    with pytest.raises(DataError, match="must be a list of different tokens"):
        _made({**base, "pre": "gpt-2", "tokens": ["a", "b", "a"]}, "llama")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return text(key) + struct.pack("<IQ", 10, value)


_SIZES = {"context_length": 8, "block_count": 1, "embedding_length": 4, "attention.head_count": 2}
ENTRIES = [entry("general.architecture", "llama"), *(entry(f"llama.{key}", size) for key, size in _SIZES.items())]


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return head + struct.pack("<IQ", kind, offset)


def crafted(
    entries: list[bytes], tensors: list[bytes], *, data: int = 64, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + b"".join([*entries, *tensors])
    return header + b"\0" * (-len(header) % 32) + b"\0" * data


EMBEDDING = tensor("token_embd.weight", 4, 3)
HUGE = 1 << 63
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its magic number ends at 4, and the file at 0"),
    "other format": (b"PK\3\4" + bytes(40), "it does not begin with GGUF"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "is of version 50331648 of the format, or not little-endian",
    ),
    "cut off": (crafted(ENTRIES, [EMBEDDING], data=0), 'tensor "token_embd.weight" ends at'),
    "many tensors": (
        crafted(ENTRIES, [EMBEDDING], counts=(HUGE, 5)),
        "is truncated or damaged|cannot have the shape|has the tensor|dimensions",
    ),
    "many entries": (crafted(ENTRIES, [], counts=(0, (1 << 64) - 1)), "is truncated or damaged|twice|is of type"),
    "long string": (crafted([struct.pack("<Q", HUGE)], []), f"its key ends at {HUGE + 32}"),
    "long list": (crafted([text("a") + struct.pack("<IIQ", 9, 4, HUGE)], []), 'its value of "a" ends at'),
    "list of lists": (crafted([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), 'the value of "a" is a list of type 9'),
    "unknown value": (crafted([text("a") + struct.pack("<I", 77)], []), 'the value of "a" is of type 77'),
    "no text": (crafted([struct.pack("<Q", 2) + b"\xff\xfe"], []), "a key is not UTF-8"),
    "duplicate key": (crafted([*ENTRIES, ENTRIES[1]], []), 'has the key "llama.context_length" twice'),
    "alignment": (crafted([entry("general.alignment", 3)], []), "general.alignment is 3"),
    "huge tensor": (crafted(ENTRIES, [tensor("a", HUGE)]), rf"tensor \"a\" cannot have the shape \[{HUGE}\]"),
    "huge product": (crafted(ENTRIES, [tensor("a", 1 << 32, 1 << 32)]), "cannot have the shape"),
    "empty tensor": (crafted(ENTRIES, [tensor("blk.0.ffn_up_exps.weight", 0, 4, 10**15)]), "cannot have the shape"),
    "other experts": (
        crafted(ENTRIES, [EMBEDDING, tensor("blk.0.ffn_up_exps.weight", 4, 3, offset=64)], data=128),
        "'blk.0.ffn_up_exps.weight' has 3 experts, and the model null",
    ),
    "end": (
        crafted([*ENTRIES, entry("tokenizer.ggml.eos_token_id", 3)], [EMBEDDING]),
        "_token_id is 3; .* from 0 to 2",
    ),
    "no dimension": (crafted(ENTRIES, [tensor("a")]), 'tensor "a" has 0 dimensions'),
    "many dimensions": (crafted(ENTRIES, [tensor("a", 1, 1, 1, 1, 1)]), "has 5 dimensions; 1 to 4 exist"),
    "duplicate tensor": (
        crafted(ENTRIES, [EMBEDDING, tensor("token_embd.weight", 4, offset=64)], data=128),
        "the tensor .* twice",
    ),
    "two names": (
        crafted(ENTRIES, [EMBEDDING, tensor("model.embed_tokens.weight", 4, offset=64)], data=128),
        "holds tensor 'model.embed_tokens.weight' twice",
    ),
    "overlapping": (
        crafted(ENTRIES, [EMBEDDING, tensor("a", 4, offset=32)]),
        'tensor "a" begins at 32, and its place is 64',
    ),
    "outside": (crafted(ENTRIES, [tensor("a", 4, offset=HUGE)]), f'tensor "a" begins at {HUGE}'),
    "half a block": (crafted(ENTRIES, [tensor("a", 33, kind=8)]), 'rows of "a" have 33 values, in blocks of 32'),
    "unknown type": (crafted(ENTRIES, [tensor("a", 32, kind=200)]), r"tensor \"a\" is of type 200 \(no known name\)"),
    "type of integers": (
        crafted(ENTRIES, [tensor("a", 32, kind=26)]),
        r"is of type 26 \(I32\), which the installed package",
    ),
    "no embedding": (crafted(ENTRIES, []), "lacks token_embd.weight"),
    "no size": (crafted(ENTRIES[:-1], [EMBEDDING]), "lacks attention.head_count"),
}
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "no architecture": (crafted([], []), "is of architecture null; GGUF files are read of llama, qwen2"),
    "other architecture": (crafted([entry("general.architecture", "mamba")], []), 'is of architecture "mamba"'),
    "parts": (crafted([ENTRIES[0], entry("split.count", 3)], []), "is one of 3 parts; join them with llama-gguf-split"),
    "architectures": (crafted([entry("general.architecture", [1])], []), r'is of architecture "\[1\]"'),
    "parts of a text": (crafted([ENTRIES[0], entry("split.count", "x")], []), 'one of "x" parts'),
    "a list of parts": (crafted([ENTRIES[0], entry("split.count", [1, 2])], []), "split.count is a list of 2 values"),
    **{
        f"a list as {key}": (crafted([*ENTRIES, entry(key, [1, 2])], [EMBEDDING]), f"{key} is a list of 2 values; one")
        for key in ("llama.feed_forward_length", "llama.vocab_size", "llama.rope.scaling.type")
    },
    "a list of ends": (crafted([*ENTRIES, entry("tokenizer.ggml.eos_token_id", [1])], [EMBEDDING]), "is a list of 1"),
    "experts": (
        crafted([*ENTRIES, entry("llama.expert_count", 8)], [EMBEDDING]),
        "llama.expert_count is 8, which is not read",
    ),
    "half rotated": (crafted([*ENTRIES, entry("llama.rope.dimension_count", 1)], [EMBEDDING]), "must be 2 here"),
    "no heads": (
        crafted([*ENTRIES[:-1], entry("llama.attention.head_count", 0)], [EMBEDDING]),
        "0 heads of 4 are not read",
    ),
}
TOKENIZERS: dict[str, tuple[list[bytes], str]] = {
    "kind": ([entry("tokenizer.ggml.model", "rwkv")], 'its tokenizer is of kind "rwkv"; gpt2 and llama are read'),
    "rule": (
        [entry("tokenizer.ggml.model", "gpt2"), entry("tokenizer.ggml.pre", "new")],
        'cuts words by the rule "new"; the rules gpt-2, smollm',
    ),
    "no scores": ([entry("tokenizer.ggml.model", "llama")], "tokenizer.ggml.scores must have a score for each token"),
    "outside": (
        [
            entry("tokenizer.ggml.model", "gpt2"),
            entry("tokenizer.ggml.pre", "gpt-2"),
            entry("tokenizer.ggml.padding_token_id", 9),
        ],
        "tokenizer.ggml.padding_token_id is 9; it must be from 0 to 1",
    ),
    "switch": ([entry("tokenizer.ggml.add_bos_token", "no")], 'add_bos_token is "no"; it must be true or false'),
    "few types": ([entry("tokenizer.ggml.token_type", [3])], "token_type must have a number for each token"),
    "template": (
        [
            entry("tokenizer.ggml.model", "gpt2"),
            entry("tokenizer.ggml.pre", "gpt-2"),
            entry("tokenizer.chat_template", 5),
        ],
        "tokenizer.chat_template is 5; it must be a text",
    ),
}


@pytest.mark.parametrize("name", [*DAMAGED, *UNSUPPORTED])
def test_bad_files_are_one_error(tmp_path: Path, name: str) -> None:
    content, message = (DAMAGED | UNSUPPORTED)[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError if name in DAMAGED else ConfigError, match=message) as caught:
        PretrainedFolder(path)
    assert str(path) in str(caught.value)


def test_a_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_TABLE_BYTES", 50)
    (tmp_path / "long.gguf").write_bytes(crafted(ENTRIES, [EMBEDDING]))
    with pytest.raises(CheckpointError, match=r"its key ends at \d+, and headers have at most 50 bytes"):
        GgufFolder(tmp_path / "long.gguf")


CONFIGS: dict[str, tuple[str, list[bytes], list[str], dict[str, Any]]] = {
    "usual": ("llama", [], [], {"attention_bias": False, "eos_token_id": None, "tie_word_embeddings": True}),
    "biases": ("llama", [], ["blk.0.attn_output.bias", "output.weight"],
               {"attention_bias": True, "tie_word_embeddings": False}),
    "ends": ("llama", [entry("tokenizer.ggml.eos_token_id", 1), entry("tokenizer.ggml.eot_token_id", 2)], [],
             {"eos_token_id": [1, 2]}),
    "scaled": ("llama", [entry("llama.rope.scaling.type", "linear"), entry("llama.rope.scaling.factor", 4)], [],
               {"rope_scaling": {"rope_type": "linear", "factor": 4}}),
    "half of a head": ("phi3", [entry("phi3.rope.dimension_count", 1)], [], {"partial_rotary_factor": 0.5}),
    "gemma": ("gemma2", [entry("gemma2.attention.key_length", 8)], [], {"query_pre_attn_scalar": 8}),
    "the largest gemma": ("gemma2", [entry("gemma2.attention.key_length", 8), entry("gemma2.block_count", 46)], [],
                          {"query_pre_attn_scalar": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_follow_from_entries_and_tensors(tmp_path: Path, name: str) -> None:
    architecture, own, others, expected = CONFIGS[name]
    sizes = [entry(f"{architecture}.{key}", size) for key, size in _SIZES.items()]
    if any(b"block_count" in each for each in own):
        sizes = [each for each in sizes if b"block_count" not in each]
    tensors = [EMBEDDING, *(tensor(each, 4, offset=64 + 32 * at) for at, each in enumerate(others))]
    content = crafted([entry("general.architecture", architecture), *sizes, *own], tensors, data=128)
    (tmp_path / "small.gguf").write_bytes(content)
    config = GgufFolder(tmp_path / "small.gguf").config
    assert {field: config.get(field) for field in expected} == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bad_tokenizers_are_one_error(tmp_path: Path, name: str) -> None:
    own, message = TOKENIZERS[name]
    tokens = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    (tmp_path / "bad.gguf").write_bytes(crafted([*ENTRIES, tokens, *own], [EMBEDDING]))
    with pytest.raises(DataError, match=message):
        PretrainedFolder(tmp_path / "bad.gguf")


def test_a_file_may_be_named_by_dots_alone(file: Path) -> None:
    """The name of the folder that it becomes is taken from it."""
    path = file.rename(file.with_name("...gguf"))
    assert GgufFolder(path).folder.name == "model"


def test_every_cut_of_a_file_is_an_error(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for size in (*range(0, 200, 7), len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"is truncated|is not a GGUF file"):
            PretrainedFolder(cut)
    assert main(["import-hf", str(cut), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardwise import-hf: error: {cut} is truncated")
    assert said.count("\n") == 1


def test_temporary_files_go_with_the_model(file: Path) -> None:
    opened = PretrainedFolder(file)
    folder = opened.path
    assert (folder / "config.json").is_file()
    del opened
    assert not folder.exists()


def test_the_library_is_named_if_it_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[gguf\]'"):
        PretrainedFolder(file)
