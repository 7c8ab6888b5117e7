"""What trl's DPOTrainer makes of pairs, and ten steps of its loss: a program of its own, since trl is slow to import.

    python trl_pairs.py FOLDER

reads FOLDER/cases.json: ``model`` (a folder), ``template``, ``forms`` (lists of records, each list of one form), and
``batches`` (for each step the records of the first form), and writes FOLDER/trl.json: of each form the ``prompt_ids``,
``chosen_ids`` and ``rejected_ids``, and by the name of each kind of loss the losses and metrics of all steps.
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

KINDS: dict[str, dict[str, Any]] = {"sigmoid": {}, "robust": {"label_smoothing": 0.2}, "hinge": {}, "ipo": {}}
BETA = 0.3


def main(folder: Path) -> None:
    os.environ["HF_HOME"] = str(folder / "hf")
    warnings.simplefilter("ignore")
    import datasets
    import torch
    import transformers
    import trl

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from storage.adapters.reference_steps import reference_losses

    datasets.disable_progress_bars()
    datasets.disable_caching()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(cases["model"])
    tokenizer.chat_template = cases["template"]
    tokenizer.pad_token = tokenizer.eos_token

    def trainer_of(records: list[dict[str, Any]], kind: str = "sigmoid") -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(cases["model"], dtype=torch.float64)
        options = {"beta": BETA, "loss_type": [kind], "max_length": None, "gradient_checkpointing": False}
        args = trl.DPOConfig(
            output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False, **options, **KINDS[kind]
        )
        return trl.DPOTrainer(
            model=model, args=args, train_dataset=datasets.Dataset.from_list(records), processing_class=tokenizer
        )

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    forms = [
        [{name: sample[name] for name in names} for sample in trainer_of(records).train_dataset]
        for records in cases["forms"]
    ]
    steps = {}
    for kind in KINDS:
        trainer = trainer_of(cases["forms"][0], kind)
        batches = [
            trainer.data_collator([trainer.train_dataset[index] for index in batch]) for batch in cases["batches"]
        ]
        trainer.model.train()
        losses = reference_losses(trainer.model, batches, trainer.compute_loss)
        rewards = {name: values for name, values in trainer._metrics["train"].items() if name.startswith("rewards/")}
        steps[kind] = {"loss": losses} | rewards
    (folder / "trl.json").write_text(json.dumps({"forms": forms, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
