"""From text to batches: corpus, tokens, samples, and the order in which they are seen.

::

    read_corpus / stdlib_corpus -> Corpus.split -> TokenStream -> TokenDataset      -> DataLoader
                                                              \\-> EvaluationWindows -> evaluation_batches
"""

from shardwise.data.corpus import Corpus
from shardwise.data.dataset import IGNORE_INDEX, EvaluationWindows, TokenDataset
from shardwise.data.loader import Batch, BatchSchedule, DataLoader, evaluation_batches
from shardwise.data.reading import read_corpus
from shardwise.data.stdlib import stdlib_corpus
from shardwise.data.tokens import TokenStream

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "BatchSchedule",
    "Corpus",
    "DataLoader",
    "EvaluationWindows",
    "TokenDataset",
    "TokenStream",
    "evaluation_batches",
    "read_corpus",
    "stdlib_corpus",
]
