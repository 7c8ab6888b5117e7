"""What trl's SFTTrainer makes of records: a program of its own, since trl takes seconds to import.

    python trl_samples.py FOLDER [--dataset-only]

reads FOLDER/cases.json, a list of objects with ``tokenizer`` (a folder), ``template`` (a chat template or null),
``records``, and ``assistant_only``, and writes FOLDER/samples.json: for each case the ``input_ids`` and ``labels``. The
records of the first case are saved as a dataset first, in FOLDER/saved; nothing else with ``--dataset-only``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main(folder: Path, *, dataset_only: bool) -> None:
    os.environ["HF_HOME"] = str(folder / "hf")
    warnings.simplefilter("ignore")
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    cases = json.loads((folder / "cases.json").read_text())
    saved = datasets.Dataset.from_list(cases[0]["records"])
    datasets.DatasetDict({"train": saved}).save_to_disk(folder / "saved", num_shards={"train": 2})
    if dataset_only:
        return

    import transformers
    import trl

    logging.disable(logging.WARNING)
    config = transformers.LlamaConfig(
        vocab_size=600, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)

    def samples_of(case: dict[str, Any]) -> list[dict[str, list[int]]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(case["tokenizer"])
        tokenizer.chat_template = case["template"]
        tokenizer.pad_token = tokenizer.eos_token
        options = {"assistant_only_loss": case["assistant_only"], "max_length": None, "shuffle_dataset": False}
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False, **options),
            train_dataset=datasets.Dataset.from_list(case["records"]),
            processing_class=tokenizer,
        )
        return [{name: sample[name] for name in ("input_ids", "labels")} for sample in trainer.train_dataset]

    (folder / "samples.json").write_text(json.dumps([samples_of(case) for case in cases]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dataset_only=sys.argv[2:] == ["--dataset-only"])
