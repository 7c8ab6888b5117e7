"""What the README shows is what happens."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.forked import run_forked
from harness.program import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def first_example(document: str) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


def run_as_rank(script: Path, store: Path, rank: int, ranks: int) -> None:
    """As under torchrun, without its agent: a file for the rendezvous, so that no port is needed."""
    join = dist.init_process_group
    meeting = dist.FileStore(str(store), ranks)
    dist.init_process_group = lambda backend, **alone: join(backend, store=meeting, rank=rank, world_size=ranks)
    runpy.run_path(str(script))


def run_example(document: str, folder: Path, ranks: int) -> str:
    script = folder / "example.py"
    script.write_text(first_example(document), encoding="utf-8")
    calls = [(script, folder / f"store{ranks}", rank, ranks) for rank in range(ranks)]
    done = run_forked(run_as_rank, calls, folder)
    assert [code for code, _ in done] == [0] * ranks, done
    return "".join(line for line in done[0][1].splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/tensor_parallel.md"])
def test_an_example_runs_alone(tmp_path, page):
    blocks = re.findall(r"^```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text("\n".join(blocks[:1] if page == "README.md" else blocks), encoding="utf-8")
    # What one rank prints; nothing about a launcher that is missing.
    done = run("-u", tmp_path / "example.py")
    assert re.match(r"loss 1|1 ranks: ", done.stdout)


def test_the_readme_shows_the_engine_and_the_guide_its_door():
    doors = r"shardwise(\.| import )(tensor_parallel|parallel_state|megatron)\b"
    assert "from shardwise import Topology" in first_example("README.md")
    assert re.search(doors, first_example("README.md")) is None
    assert re.search(doors, first_example("docs/porting.md")) is not None


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/porting.md"])
def test_python_example_gives_the_same_loss_at_every_number_of_ranks(tmp_path, document):
    losses = {ranks: run_example(document, tmp_path, ranks) for ranks in (1, 2, 3)}
    assert re.fullmatch(r"loss 1\d\.\d{6}\n", losses[1])
    assert len({round(float(text.split()[1]), 4) for text in losses.values()}) == 1


def pages() -> list[Path]:
    roots = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    return [*roots, *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_and_files_named_in_the_documents_exist():
    for document in [*pages(), ROOT / "CHANGELOG.md"]:
        text = document.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            page = document.parent / target if target else document
            assert page.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in anchors(page), f"{document.name} links to {target}#{anchor}"
    for document in pages():
        for named in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.-]+)`", document.read_text()):
            assert (ROOT / named).exists(), f"{document.name} names {named}"


def test_the_index_has_every_page():
    docs = ROOT / "docs"
    linked = {(docs / target).resolve() for target in re.findall(r"\]\(([^)#:]+)", (docs / "README.md").read_text())}
    assert {path for path in docs.rglob("*.md") if path.parent.name != "decisions"} - linked == {docs / "README.md"}


def test_commands_of_torchrun_set_the_threads():
    """Otherwise torchrun's first three lines are about them."""
    programs = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh")]
    programs.append(ROOT / "src" / "shardwise" / "cli" / "training.py")
    for path in [*pages(), *programs]:
        before, command, _ = re.sub("`torchrun[^`]*`", "", path.read_text("utf-8")).partition("torchrun --n")
        assert not command or "OMP_NUM_THREADS=" in before, path


def test_no_page_is_long():
    assert {page.name: lines for page in pages() if (lines := len(page.read_text("utf-8").splitlines())) > 250} == {}


def test_the_two_commands_of_the_readme_are_the_makefiles():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_ten_files_to_read_are_short_and_have_what_to_look_for():
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `([\w/.]+)` \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 11))
    sources = [(ROOT / path).read_text(encoding="utf-8") for _, path, _ in rows]
    assert sum(len(source.splitlines()) for source in sources) <= 3000
    for source, (_, path, what) in zip(sources, rows, strict=True):
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", what):
            assert name.split(".")[-1] in source, f"{path} has no {name}"
