"""``shardwise generate`` on a checkpoint as training writes it."""

from __future__ import annotations

import json
import shutil
import string
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.distributed as dist
from harness.program import run as run_program
from run.run_processes import run_command
from tokenizers import processors

from shardwise import on_ranks
from shardwise.cli.main import run_subcommand
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamLayout
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.generation import Sampling, generate
from shardwise.models.gpt import GPT
from shardwise.run import generate as generate_text
from shardwise.run.build import build_model
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.settings import ModelSettings, ParallelSettings, Settings, TrainingSettings
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint import ParamShard

STEPS = (1, 2)
AUTO = "layers: those for inference, which are faster than those of training"

main = partial(run_subcommand, "generate")


class Run:
    """A run's folder, and what its newest checkpoint should write."""

    def __init__(self, folder: Path, *, marks_beginnings: bool = False) -> None:
        self.folder = folder
        self.newest = folder / "checkpoints" / f"step-{STEPS[-1]:08d}"
        self.tokenizer = Tokenizer.train(["def eins(zwei):\n    return zwei  # größer 中文\n"], 290)
        if marks_beginnings:
            backend = tokenizers.Tokenizer.from_str(self.tokenizer._backend.to_str())
            backend.add_special_tokens(["<s>"])
            template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 290)])
            backend.post_processor = template
            self.tokenizer = Tokenizer(backend)
        # Split over two ranks and along the sequence, which generation on one rank must not care about.
        self.settings = Settings(
            data=("x",),
            out=str(folder),
            model=ModelSettings(num_layers=2, hidden_size=16, num_heads=2, vocab_size=290, sequence_length=32),
            parallel=ParallelSettings(tp=2, sequence_parallel=True),
            training=TrainingSettings(dtype="float64"),
        )
        with open_ranks("cpu"):
            for step in STEPS:
                state = sharded_state_dict(self.model(step), "model.", group=dist.group.WORLD)
                state["optimizer.step"] = ParamShard(
                    "optimizer.step", torch.zeros(3), ParamLayout.replicated((3,), 1), 0
                )
                checkpoint.save(
                    folder / "checkpoints",
                    step,
                    state,
                    {"settings": self.settings.to_json(), "tokenizer_sha256": self.tokenizer.sha256},
                    group=dist.group.WORLD,
                    extra_files=self.tokenizer.save,
                )

    def model(self, step: int) -> GPT:
        torch.manual_seed(step)
        groups = Groups(tp=dist.group.WORLD)
        model = build_model(self.settings, self.tokenizer.vocab_size, groups=groups, device=torch.device("cpu"))
        with torch.no_grad():
            for param in model.parameters():
                # All initial logits are about equal; with a much larger factor one token always wins.
                param *= 5
        return model

    def text(self, prompt: str, max_new_tokens: int, sampling: Sampling, seed: int = 0) -> str:
        ids, eos_id = self.tokenizer._backend.encode(prompt).ids, self.tokenizer.eos_id
        with open_ranks("cpu"):
            model = self.model(STEPS[-1])
            new = generate(model, ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, eos_id=eos_id)
        return self.tokenizer.decode([*ids, *new]).removeprefix("<s>") + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("prompt", ["def f(", "größe", ""])
def test_writes_the_prompt_and_what_the_newest_model_adds(run, capsys, prompt):
    assert main([str(run.folder), "--prompt", prompt, "--max-new-tokens", "60", "--seed", "5"]) == 0
    written = capsys.readouterr()
    assert written.out == run.text(prompt, 60, Sampling(0.8, top_k=50), seed=5)
    assert len(written.out) > 30
    assert written.err == f"shardwise generate: {AUTO}\n"


@pytest.mark.parametrize("layers", ["training", "inference", "fused"])
def test_layers_that_are_asked_for_write_the_same(run, capsys, layers):
    arguments = [str(run.folder), "--prompt", "def f(", "--max-new-tokens", "20", "--layers", layers]
    assert main(arguments) == 0
    written = capsys.readouterr()
    assert written.out == run.text("def f(", 20, Sampling(0.8, top_k=50))
    kind = "those of training" if layers == "training" else "those for inference"
    assert written.err.startswith(f"shardwise generate: layers: {kind}, as asked for")


def test_what_the_tokenizer_puts_in_front_is_read_and_not_shown(tmp_path, capsys):
    run = Run(tmp_path, marks_beginnings=True)
    assert run.tokenizer.beginning == (290,)
    for prompt in ("def ", ""):
        assert main([str(run.folder), "--prompt", prompt, "--max-new-tokens", "12", "--temperature", "0"]) == 0
        text = run.text(prompt, 12, Sampling(temperature=0.0))
        assert capsys.readouterr().out == text
    # And it matters: without it the model writes something else.
    text = run.text("def ", 12, Sampling(temperature=0.0))
    run.tokenizer._backend.post_processor = None
    assert run.text("def ", 12, Sampling(temperature=0.0)) != text


def test_flags_reach_the_sampling(run, capsys):
    flags = ["--max-new-tokens", "30", "--temperature", "1.5", "--top-k", "0", "--top-p", "0.9"]
    assert main([str(run.folder), "--prompt", "x", *flags]) == 0
    assert capsys.readouterr().out == run.text("x", 30, Sampling(1.5, top_p=0.9))


def test_folders_that_name_a_checkpoint(run, capsys):
    texts = {}
    for folder in (run.folder, run.folder / "checkpoints", *(run.folder / "checkpoints").iterdir()):
        assert main([str(folder), "--prompt", "x", "--max-new-tokens", "20"]) == 0
        texts[folder.name] = capsys.readouterr().out
    assert texts[run.folder.name] == texts["checkpoints"] == texts["step-00000002"] != texts["step-00000001"]


def test_pieces_are_shown_as_they_come(run, monkeypatch):
    shown = []
    monkeypatch.setattr("shardwise.cli.reporting.show", shown.append)
    main([str(run.folder), "--prompt", "def f(", "--max-new-tokens", "20"])
    # The prompt, each token and the line's end.
    assert len(shown) == 22
    assert shown[0] == "def f("
    assert "".join(shown) == run.text("def f(", 20, Sampling(0.8, top_k=50))


def test_a_long_prompt_is_read_from_its_end(run, capsys):
    prompt = "return zwei " * 30
    assert main([str(run.folder), "--prompt", prompt, "--max-new-tokens", "4"]) == 0
    written = capsys.readouterr()
    assert written.out.startswith(prompt)
    count = len(run.tokenizer.encode(prompt))
    assert f"the prompt has {count} tokens, and the model reads only the last 32" in written.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topk", "3"], "unknown flag --topk; did you mean --top-k?"),
        (["--tp", "3"], "2 attention heads cannot be split over 3 ranks; use --nproc 2 or less"),
        (["--tp", "2", "--nproc", "1"], "--tp 2 is not the number of ranks, 1"),
        (["--pp", "3"], "2 layers cannot be split over --pp 3 stages; use 2 or fewer"),
        (["--pp", "2", "--nproc", "3"], "--pp 2 does not divide the 3 ranks; start a multiple of it"),
        (["--pp", "2", "--tp", "2", "--nproc", "2"], "--tp 2 times --pp 2 is not the number of ranks, 2"),
    ],
)
def test_flags_that_cannot_be(run, flags, message):
    with pytest.raises(ConfigError, match=message):
        main([str(run.folder), *flags])


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the --out"):
        main([str(tmp_path)])
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="step-00000001"):
        main([str(tmp_path / "step-00000001")])


def test_checkpoints_that_are_damaged(run, tmp_path):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(run.newest, tmp_path / f"step-{name}"))

    other = copy("other")
    Tokenizer.train(["other"], 270).save(other)
    with pytest.raises(CheckpointError, match="is not the tokenizer that the model was trained with"):
        main([str(other)])
    without = copy("without")
    (without / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="no tokenizer at"):
        main([str(without)])
    broken = copy("broken")
    tensors = next(broken.glob("*.safetensors"))
    _damage_a_weight(tensors)
    with pytest.raises(CheckpointError, match=tensors.name):
        main([str(broken)])


def _damage_a_weight(path: Path) -> None:
    """Change a byte of a tensor that the model has; the optimizer's are not read to generate."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    begin, _ = next(
        entry["data_offsets"] for name, entry in header.items() if "embedding" in name and "optim" not in name
    )
    content[start + begin] ^= 0xFF
    path.write_bytes(content)


def test_checkpoints_of_other_programs(tmp_path):
    with open_ranks("cpu"):
        state = {"x": ParamShard("x", torch.zeros(1), ParamLayout.replicated((1,), 1), 0)}
        checkpoint.save(tmp_path, 1, state, {"settings": {}}, group=dist.group.WORLD)
    with pytest.raises(CheckpointError, match=r"not written by shardwise train: tokenizer_sha256 is missing"):
        main([str(tmp_path)])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
def test_leaves_no_thread_of_a_process_group(run):
    # In a process of its own, where nothing is imported or made before.
    program = (
        "import sys; from pathlib import Path; from shardwise.cli.main import main; main(['generate', *sys.argv[1:]]);"
        "print(*sorted(path.read_text().strip() for path in Path('/proc/self/task').glob('*/comm')), file=sys.stderr)"
    )
    command = ["-c", program, run.folder, "--prompt", "x", "--max-new-tokens", "2"]
    done = run_program(*command, OMP_NUM_THREADS="1")
    assert "python" in done.stderr
    assert "gloo" not in done.stderr


@pytest.mark.slow
def test_the_same_text_on_two_ranks(run, tmp_path):
    arguments = ["--prompt", "größe", "--max-new-tokens", "60", "--nproc", "2"]
    text = run.text("größe", 60, Sampling(0.8, top_k=50))
    assert run_command(tmp_path, 2, "generate", run.folder, *arguments) == (text, f"shardwise generate: {AUTO}\n")


@pytest.mark.slow
def test_the_text_that_python_gets_from_stages_has_its_last_characters(run):
    """Also those that might have begun a stop string, which are held back until the end.

    The repetition penalty counts all tokens of a prompt, also those before the ones that the model reads.
    """
    prompt = string.printable.strip() + "def f(" * 20
    sampling = Sampling(0.8, top_k=50, repetition_penalty=4.0)
    text, shorter = (run.text(each, 20, sampling).removeprefix(each)[:-1] for each in (prompt, "def f(" * 20))
    assert text != shorter
    call = partial(generate_text, pp=2, max_new_tokens=20, repetition_penalty=4.0, stop=text[-1] + "zzz", device="cpu")
    assert on_ranks(call, run.folder, prompt, nproc=2, join=False) == [text] * 2
