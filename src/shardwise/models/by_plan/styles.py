"""The styles of transformers' tensor-parallel plans, as moves between layouts (``core.layout``).

================================ ============================ ================ ==============================
style                            input                        parameters       output
================================ ============================ ================ ==============================
colwise                          I -> R                       rows             V
colwise_gather_output            I -> R                       rows             V -> I
colwise_rep                      as colwise_gather_output
packed_colwise                   I -> R                       rows of 2 parts  V
rowwise                          V                            columns          P -> I
rowwise_split_input              I -> V                       columns          P -> I
rowwise_rep                      as rowwise_split_input
packed_rowwise                   V                            columns of 2     P -> I
embedding_rowwise                ids                          rows             P -> I
embedding_colwise                ids                          columns          V -> I
moe_tp_experts                   I -> R, also scores          as planned       P -> I
all_reduce                       I -> R                       as planned       P -> I
moe_identity_expert              R, divided by the ranks      none             P
mla_kv_a_proj                    I                            whole            I; its rotary part I -> R
replicated_with_grad_allreduce   V                            whole, R         V
local_params                     as planned                   as planned       as planned
replicate                        I                            whole            I
================================ ============================ ================ ==============================

A style that names a parameter, such as one of experts, states only how the parameter is split. Rows are the last
dimension but one, or the only one; columns are the last.
"""

from dataclasses import dataclass

from shardwise.core.layout import I, Layout, P, R, V

SPLIT, ENTERING = V(dim=-1), (I, R)


@dataclass(frozen=True)
class Style:
    """One row of the table.

    Attributes:
        source: layouts of the input outside and inside the module; None if the style does not move it.
        target: layouts of the output inside and outside; None if the style does not move it.
        dim: split dimension of the parameters, -2 for rows and -1 for columns; None if they are whole.
        sections: number of equal parts of that dimension that are split separately.
        is_partial: whether the gradients of whole parameters are partial sums.
        vocabulary: whether the weight's rows are looked up by ids, which are then those of this rank's rows.
        refusal: why the style cannot be carried out; empty if it can.
    """

    source: tuple[Layout, Layout] | None = None
    target: tuple[Layout, Layout] | None = None
    dim: int | None = None
    sections: int = 1
    is_partial: bool = False
    vocabulary: bool = False
    refusal: str = ""

    @property
    def keeps_features(self) -> bool:
        """True if the caller of the module sees features that are split, so that attention must agree on heads."""
        return self.dim is not None and SPLIT in ((self.source or ENTERING)[0], (self.target or ENTERING)[1])


_GATHERED = Style(ENTERING, (SPLIT, I), dim=-2)
_SCATTERED = Style((I, SPLIT), (P, I), dim=-1)
_SUMMED = Style(ENTERING, (P, I))
_EXPERT_PLAN = "it is of the plan of experts; the tensor-parallel plan splits each expert over the ranks instead"

STYLES = {
    "colwise": Style(ENTERING, (SPLIT, SPLIT), dim=-2),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "packed_colwise": Style(ENTERING, (SPLIT, SPLIT), dim=-2, sections=2),
    "rowwise": Style((SPLIT, SPLIT), (P, I), dim=-1),
    "rowwise_split_input": _SCATTERED,
    "rowwise_rep": _SCATTERED,
    "packed_rowwise": Style((SPLIT, SPLIT), (P, I), dim=-1, sections=2),
    "embedding_rowwise": Style(None, (P, I), dim=-2, vocabulary=True),
    "embedding_colwise": Style(None, (SPLIT, I), dim=-1),
    "moe_tp_experts": _SUMMED,
    "all_reduce": _SUMMED,
    "moe_identity_expert": Style((R, P)),
    "mla_kv_a_proj": Style(None, ENTERING),
    "replicated_with_grad_allreduce": Style(is_partial=True),
    "local_params": Style(),
    "replicate": Style(),
    "sequence_parallel": Style(refusal="it splits the sequence, which a plan does not do here"),
    "grouped_gemm": Style(refusal=_EXPERT_PLAN),
    "ep_dispatch_experts": Style(refusal=_EXPERT_PLAN),
}
"""The styles of the registries of transformers 5.23, by name."""
