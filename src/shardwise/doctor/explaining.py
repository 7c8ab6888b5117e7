"""Explain a wrong tensor: which known fault turns the reference's values into the suspect's."""

from __future__ import annotations

from shardwise.doctor import rank_faults, value_faults
from shardwise.doctor.evidence import UNEXPLAINED, Case, Explanation
from shardwise.doctor.judging import Judged

# Those that explain the most exactly come first.
_FAULTS = (
    rank_faults.restarted,
    rank_faults.other_layout,
    rank_faults.misplaced,
    rank_faults.one_copy,
    rank_faults.one_term,
    value_faults.with_every_micro_batch,
    value_faults.local_means,
    value_faults.factor,
    value_faults.added_by_each,
    rank_faults.own_terms,
    rank_faults.halves_of_joint,
    value_faults.labels_of_loss,
    value_faults.stale,
    value_faults.stale_input,
    rank_faults.wrong_group,
    rank_faults.but_bias,
    rank_faults.other_rows,
    value_faults.other_labels,
    value_faults.random_stream,
    rank_faults.positions,
    rank_faults.drifted,
)


def explain(case: Case, wrong: Judged) -> Explanation:
    """Return the first explanation that turns the reference into the suspect's values within rounding."""
    for fault in _FAULTS:
        if (found := fault(case, wrong)) is not None:
            return found
    return Explanation(UNEXPLAINED, f"it differs by {wrong.relative:.1e} relative to the reference")
