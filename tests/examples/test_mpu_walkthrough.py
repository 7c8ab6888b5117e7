"""What the walk-through prints is what plain PyTorch computes, and what its README shows."""

from __future__ import annotations

import re
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import bloom
import cross_entropy
import embedding
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.forked import run_forked
from torch import nn

from shardwise.parallel_state import destroy_model_parallel, initialize_model_parallel

FOLDER = Path(__file__).parents[2] / "examples" / "mpu_walkthrough"
# Ids of tensor-parallel rank 0 and 1; ranks 2 and 3 are the second stage's.
RANGES = [(0, 4), (4, 7)] * 2
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@contextmanager
def grid():
    """The walk-through's groups, among the harness's ranks."""
    initialize_model_parallel(2, 2)
    try:
        yield
    finally:
        destroy_model_parallel()


def printed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the script prints when it is run, on the harness's ranks."""
    texts: list[str] = []
    monkeypatch.setattr(script, "four_ranks", grid)
    monkeypatch.setattr(script, "print_once", texts.append)
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    script.main()
    return texts[0]


def sections(text: str) -> list[list[str]]:
    """The lines of each rank, without the one that says where it is."""
    parts = re.split(r"^rank \d: .*\n", text + "\n", flags=re.MULTILINE)[1:]
    return [[line.strip() for line in part.splitlines()] for part in parts]


def numbers(line: str, label: str) -> torch.Tensor:
    """What a line says behind its label."""
    assert line.startswith(label), line
    return torch.tensor([float(number) for number in NUMBER.findall(line.removeprefix(label))])


def assert_prints(line: str, label: str, expected: torch.Tensor) -> None:
    """Four decimals of what is expected."""
    found = numbers(line, label)
    assert found.shape == expected.flatten().shape, line
    assert (found - expected.flatten()).abs().max() <= 5.1e-5, (line, expected)


def shown_in_readme(script: str) -> str:
    """The output under the script's command."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    shown = rf"^OMP_NUM_THREADS=1 torchrun .*/{script}\n```\n+```text\n(.*?)```"
    (output,) = re.findall(shown, readme, re.DOTALL | re.MULTILINE)
    return output


def assert_same_text(found: str, expected: str) -> None:
    """The same words; numbers may differ in the last decimal, as sums of floats do between machines."""
    assert NUMBER.sub("#", found.strip()) == NUMBER.sub("#", expected.strip())
    values = [torch.tensor([float(number) for number in NUMBER.findall(text)]) for text in (found, expected)]
    assert (values[0] - values[1]).abs().max() <= 2e-4


@pytest.mark.ranks(4)
def test_the_embedding_is_that_of_one_table(group, monkeypatch):
    text = printed(embedding, monkeypatch)
    dense = nn.Embedding.from_pretrained(embedding.whole_table())
    ids = embedding.IDS[0]
    for (first, last), lines in zip(RANGES, sections(text), strict=True):
        mine = (ids >= first) & (ids < last)
        assert lines[0] == f"holds ids {first} to {last - 1} of 7: a table of [{last - first}, 3]"
        assert_prints(lines[1], "ids", ids)
        assert_prints(lines[2], "mine", mine.float())
        assert_prints(lines[3], "row in table", (ids - first) * mine)
        for token, line in zip(ids, lines[4:8], strict=True):
            lookup, summed = line.removeprefix(f"id {token}: my lookup").split("summed")
            held = first <= token < last
            assert_prints(lookup, "", dense(token) if held else torch.zeros(3))
            assert_prints(summed, "", dense(token))
        assert lines[8:] == ["equal to torch.nn.Embedding: True"]
    assert_same_text(text, shown_in_readme("embedding.py"))


@pytest.mark.ranks(4)
def test_the_cross_entropy_is_that_of_all_logits(group, monkeypatch):
    text = printed(cross_entropy, monkeypatch)
    logits, targets = cross_entropy.LOGITS.double(), cross_entropy.TARGETS
    highest = logits.amax(1)
    exponentials = (logits - highest[:, None]).exp()
    predicted = logits[torch.arange(3), targets] - highest
    loss = F.cross_entropy(logits, targets, reduction="none")
    for (first, last), lines in zip(RANGES, sections(text), strict=True):
        mine = (targets >= first) & (targets < last)
        assert lines[0] == f"has the logits of ids {first} to {last - 1} of 7"
        for token in range(3):
            assert_prints(lines[1 + token], f"token {token}:", logits[token, first:last])
        for line, (label, expected) in zip(
            lines[4:14],
            [
                ("local max", logits[:, first:last].amax(1)),
                ("global max", highest),
                ("target", targets),
                ("target among mine", torch.where(mine, targets - first, -1)),
                ("predicted logit, mine", predicted * mine),
                ("predicted logit, summed", predicted),
                ("sum of exp, mine", exponentials[:, first:last].sum(1)),
                ("sum of exp, summed", exponentials.sum(1)),
                ("loss", loss),
                ("library's loss", loss),
            ],
            strict=True,
        ):
            assert_prints(line, label, expected)
        assert lines[14:] == ["equal to torch.nn.functional.cross_entropy: True"]
    assert_same_text(text, shown_in_readme("cross_entropy.py"))


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_bloom_trains_as_transformers_does(group, tmp_path, monkeypatch):
    """From the same weights with the same batch; and what is written is read by transformers with the same loss."""
    from transformers import BloomForCausalLM

    with grid():
        assert bloom.round_trip(bloom.bloom(), tmp_path / "before")
    text = printed(bloom, monkeypatch, str(tmp_path / "after"))

    ids = bloom.batch().flatten(0, 1)
    dense = BloomForCausalLM.from_pretrained(tmp_path / "before").train()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    expected = []
    for _ in range(bloom.STEPS):
        logits = dense(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[-1] < expected[0] - 0.5
    for lines in sections(text)[2:]:
        assert (numbers(lines[1], "loss") - torch.tensor(expected)).abs().max() < 1e-3
    assert all(lines[-1] == "written for transformers and read again, bit-equal: True" for lines in sections(text))
    assert_same_text(text, shown_in_readme("bloom.py"))

    trained = BloomForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    for name, value in dense.state_dict().items():
        assert (trained[name] - value).norm() < 1e-2 * (value.norm() + 1e-2), name


def run_as_rank(store: Path, rank: int) -> None:
    """As under torchrun, without its agent: a file for the rendezvous, so that no port is needed."""
    join, meeting = dist.init_process_group, dist.FileStore(str(store), 4)
    dist.init_process_group = lambda backend: join(backend, store=meeting, rank=rank, world_size=4)
    runpy.run_path(str(FOLDER / "embedding.py"), run_name="__main__")


@pytest.mark.slow
def test_as_a_program(tmp_path):
    done = run_forked(run_as_rank, [(tmp_path / "store", rank) for rank in range(4)], tmp_path)
    assert [code for code, _ in done] == [0] * 4, done
    lines = [line for _, text in done for line in text.splitlines() if not line.startswith("[Gloo] Rank ")]
    assert_same_text("\n".join(lines), shown_in_readme("embedding.py"))
