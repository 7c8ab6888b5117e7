"""From text to batches: records, tokens, rows, and their order.

::

    read_corpus -> Corpus -> TokenStream                                       -> TokenRows, WindowRows
    read_records (-> formed) -> example_of -> ExampleEncoder -> TokenSamples               -> SampleRows
    read_records (-> formed) -> preference_of -> PreferenceEncoder -> TokenSamples         -> PairRows

    Rows -> DataLoader, to learn from -> Batch
         -> HeldOut, to measure on    -> Batch
"""

from shardwise.data.batch import IGNORE_INDEX as IGNORE_INDEX, Batch as Batch
from shardwise.data.corpus import Corpus as Corpus, stdlib_corpus as stdlib_corpus
from shardwise.data.encoding import (
    Encoded as Encoded,
    ExampleEncoder as ExampleEncoder,
    PreferenceEncoder as PreferenceEncoder,
)
from shardwise.data.examples import (
    Example as Example,
    Preference as Preference,
    example_of as example_of,
    preference_of as preference_of,
)
from shardwise.data.loader import (
    BatchSchedule as BatchSchedule,
    DataLoader as DataLoader,
    HeldOut as HeldOut,
    Rows as Rows,
)
from shardwise.data.pair_rows import PairRows as PairRows
from shardwise.data.reading import read_corpus as read_corpus, read_records as read_records
from shardwise.data.record_forms import formed as formed, read_by_form as read_by_form
from shardwise.data.sample_rows import SampleRows as SampleRows, TokenSamples as TokenSamples
from shardwise.data.tokens import TokenRows as TokenRows, TokenStream as TokenStream, WindowRows as WindowRows
from shardwise.data.turns import UnusableExampleError as UnusableExampleError
