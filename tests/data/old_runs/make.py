"""Make the runs of this folder with the code of an earlier commit, whose losses later code must reach.

    git archive eadc57ee src | tar -x -C OLD
    PYTHONPATH=OLD/src OMP_NUM_THREADS=1 python tests/data/old_runs/make.py [RUN...]

Each run does four steps on two ranks and saves after two. The checkpoint after two steps and the metrics of all four
are kept. Paths are relative to this folder.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

SIZES = (
    *("--model.num-layers", "2", "--model.hidden-size", "8", "--model.num-heads", "2", "--model.ffn-hidden-size", "16"),
    *("--model.vocab-size", "270", "--training.global-batch-size", "4"),
)
STEPS = (
    *("--training.steps", "4", "--training.save-every", "2", "--training.keep-checkpoints", "9"),
    # The first updates are as large as the others.
    *("--optimizer.warmup-steps", "0"),
)
TEXT = ("train", "--data", "text.txt", *SIZES, *STEPS, "--model.sequence-length")
FROM_BASE = (*STEPS, "--training.global-batch-size", "4", "--model.sequence-length", "33")
RUNS = {
    "train": (*TEXT, "33", "--tp", "2", "--sequence-parallel"),
    "exact": (*TEXT, "32", "--tp", "2", "--exact", "--exact-parts", "2"),
    "experts": (*TEXT, "33", "--ep", "2", "--model.num-experts", "4", "--model.num-experts-per-tok", "2"),
    "cp": (*TEXT, "33", "--cp", "2"),
    "finetune": ("finetune", "base", "--data", "chats.jsonl", *FROM_BASE, "--lora-rank", "2", "--zero", "1"),
    "dpo": ("dpo", "base", "--data", "pairs.jsonl", *FROM_BASE, "--tp", "2"),
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
KEPT = ("checkpoints/step-00000002", "metrics.jsonl", "settings.json", "tokenizer.json", "tokenizer_config.json")


def make_data() -> None:
    things = {"grass": "green", "snow": "white", "coal": "black", "blood": "red"}
    lines = [f"{number} things: grass, snow, coal. What colour is each? Sure it is one.\n" for number in range(60)]
    Path("text.txt").write_text("".join(lines))
    chats, pairs = [], []
    for thing, colour in things.items():
        for question in (f"What colour is {thing}?", f"The colour of {thing}?"):
            roles = {"user": question, "assistant": f"It is {colour}."}
            chats.append({"messages": [{"role": role, "content": text} for role, text in roles.items()]})
            pairs.append({"prompt": question, "chosen": f" {colour}", "rejected": " no idea"})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shardwise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "shardwise", *arguments], check=True)


def main() -> None:
    make_data()
    for name in sys.argv[1:] or RUNS:
        shutil.rmtree(name, ignore_errors=True)
        shardwise(*RUNS[name], "--out", f"whole/{name}", "--device", "cpu", "--nproc", "2")
        for kept in KEPT:
            source, target = Path("whole", name, kept), Path(name, kept)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.exists():
                shutil.copy(source, target)
        if name == "train":
            shutil.rmtree("base", ignore_errors=True)
            shardwise("export-hf", "whole/train", "--out", "base")
            Path("base/README.md").unlink()
            Path("base/chat_template.jinja").write_text(TEMPLATE)
    shutil.rmtree("whole")


if __name__ == "__main__":
    main()
