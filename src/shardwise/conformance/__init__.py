"""The conformance catalogue: known bugs of parallel training as small cases, and the targets that they run on.

``run("shardwise")`` runs every case on CPU ranks and returns a ``Report``. See docs/conformance.md.
"""

from shardwise.conformance.case import Case as Case, all_cases as all_cases, case as case
from shardwise.conformance.dense_comparison import joined as joined, part as part, summed as summed
from shardwise.conformance.outcomes import Report as Report, Result as Result, as_markdown as as_markdown
from shardwise.conformance.runner import run as run
