"""From text to batches: corpus, tokens, samples, and the order in which they are seen.

::

    read_corpus / stdlib_corpus -> Corpus.split -> TokenStream -> TokenDataset      -> DataLoader
                                                              \\-> EvaluationWindows -> evaluation_batches
"""

from shardwise.data.corpus import Corpus as Corpus
from shardwise.data.dataset import IGNORE_INDEX as IGNORE_INDEX
from shardwise.data.dataset import EvaluationWindows as EvaluationWindows
from shardwise.data.dataset import TokenDataset as TokenDataset
from shardwise.data.loader import Batch as Batch
from shardwise.data.loader import BatchSchedule as BatchSchedule
from shardwise.data.loader import DataLoader as DataLoader
from shardwise.data.loader import evaluation_batches as evaluation_batches
from shardwise.data.reading import read_corpus as read_corpus
from shardwise.data.stdlib import stdlib_corpus as stdlib_corpus
from shardwise.data.tokens import TokenStream as TokenStream
