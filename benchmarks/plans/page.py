"""The page ``docs/models.md`` from the measured results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
    ("first", "2"),
    ("first", "3"),
    ("first", "4"),
    ("9 heads, 3 key-value heads", "2"),
    ("12 heads, 1 key-value head", "2"),
)
# Why a class that runs whole is not right.
CAUSES = {
    "DogeConfig": "the plan's fault: it splits heads, and the model computes a mask of all of them",
    "EsmcConfig": "the plan's fault: it splits queries, which one norm over all heads reads",
    "Glm5NextTextConfig": "the plan's fault: it splits the output projection of linear attention, and not its heads",
    "NeoMMEConfig": "the plan's fault: it splits heads, and value embeddings and the factors of heads stay whole",
}
_TEXT = """\
# Models of transformers, split by their own plan

You can split any of these models with [`shardwise.parallelize`](huggingface.md#any-other-model-of-transformers). The
table has a row for each configuration class of transformers {transformers} with a tensor-parallel plan ({number}
classes). It was measured on {date} with torch {torch} on a CPU.

A model of the class, made tiny, runs whole in one process and split over the ranks, with two micro-batches of 13 and 5
labels. *right* means that logits, all gradients (the same parameters without one) and the norm differ by at most 1e-5
of the largest element of each tensor, in fp32; where rounding passes that, fp64 decides ({decided} cases).
{right}

| class | tp 2 | tp 3 | tp 4 | 9 heads of 3, tp 2 | 12 of 1, tp 2 | {other}|
|---|---|---|---|---|---|---|{line}
"""
_END = """
*9 heads of 3* has 9 query and 3 key-value heads, *12 of 1* one key-value head. There, the widths of MLP, experts and
vocabulary divide by no number of ranks; a model with latent attention keeps one key for each query. *not run* means
that the tiny model does not run whole: models of images and sounds need other inputs than token ids. A model without a
head is compared by its last hidden states. *refused* is an error of `parallelize` that names the module, before the
model is changed. *error* is an error of the split model, such as of shapes.{other}

Models have 12 heads of 8, two layers or one of each kind, 4 experts, and as many key-value heads as the class's own
ratio allows (12, 6, 4 or 1). `benchmarks/plans/tiny.py` has the rule, and at most three other fields for a class:
{overrides}

`python benchmarks/models_by_plan.py measure --json FILE` measures again, and `page` writes this page from the files.
"""


_OTHER = """

*transformers* is its own tensor parallelism, loaded by `from_pretrained(distributed_config=)`, which is
right for {counts}. A wrong one is followed by the parameters with the largest
errors of gradients, or by *logits* if these are wrong."""


def page(ours: dict[str, Any], theirs: Sequence[dict[str, Any]], overrides: dict[str, dict[str, Any]]) -> str:
    """Return the page for results of ``measure`` and, for one more column each, of ``measure --theirs``."""
    sizes = [next(iter(next(iter(each["classes"].values()))["passes"]["first"])) for each in theirs]
    rows, counts, others, decided, splits = [], Counter[tuple[str, str]](), Counter[str](), 0, 0
    for name, each in sorted(ours["classes"].items(), key=lambda item: item[0].lower()):
        splits += each["passes"].get("first", {}).get("2", {}).get("splits_loss", False)
        cells, reasons = [], []
        for column in _COLUMNS:
            result = each["passes"].get(column[0], {}).get(column[1], {"verdict": "not run"})
            cells.append(result["verdict"])
            counts[column] += result["verdict"] == "right"
            decided += result["verdict"] == "right" and result.get("dtype") == "float64"
            if result["verdict"] != "right" and result.get("reason"):
                reasons.append(result["reason"])
        for other, size in zip(theirs, sizes, strict=True):
            result = other["classes"].get(name, {}).get("passes", {}).get("first", {}).get(size, {"verdict": "not run"})
            cells.append(result["verdict"] + _tensors(result.get("largest", {})))
            others[size] += result["verdict"] == "right"
        reason = CAUSES.get(name) or (_short(reasons[0]) if reasons else "")
        rows.append(f"| `{name.removesuffix('Config')}` | {' | '.join([*cells, reason])} |")
    right = ", ".join(f"{counts[column]} at tp {column[1]}" for column in _COLUMNS[:3])
    right = f"This holds for {right}, {counts[_COLUMNS[3]]} with 9 heads, {counts[_COLUMNS[4]]} with 12 of width 1."
    right += f"""
Of the classes, {splits} compute the loss of each rank's part of the vocabulary; other models have no head, one that the
plan leaves whole, or read logits otherwise."""
    head = _TEXT.format(
        number=len(rows),
        date=ours["date"],
        decided=decided,
        right=right,
        other="".join(f"transformers, tp {size} | " for size in sizes),
        line="---|" * len(sizes),
        **ours["versions"],
    )
    listed = "; ".join(
        f"`{name.removesuffix('Config')}` {', '.join(f'{field} = {value}' for field, value in fields.items())}"
        for name, fields in overrides.items()
    )
    compared = " and ".join(f"{others[size]} at tp {size}" for size in sizes)
    other = _OTHER.format(counts=compared) if sizes else ""
    return head + "\n".join(rows) + "\n" + _END.format(overrides=f"{listed}.", other=other)


def _tensors(largest: Mapping[str, float]) -> str:
    """Return the ends of at most two different names of parameters, or that the logits differ."""
    if not largest or "logits" in largest:
        return ": logits" if largest else ""
    names = [name.removesuffix(".weight").split(".")[-1] for name in largest if name != "norm"]
    return f": {', '.join(list(dict.fromkeys(names or ['norm']))[:2])}"


def _short(reason: str) -> str:
    """Return one line for a cell of a table."""
    kind, _, message = reason.partition(": ")
    text = " ".join((message if kind.endswith("Error") else reason).split()).replace("|", "/")
    return text if len(text) <= 90 else f"{text[:87]}..."
