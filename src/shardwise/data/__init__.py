"""From text to batches: corpus, tokens, samples, and the order in which they are seen.

::

    read_corpus / stdlib_corpus -> Corpus.split -> TokenStream -> TokenDataset      -> DataLoader
                                                              \\-> EvaluationWindows -> evaluation_batches
    read_records -> example_of -> ExampleEncoder -> TokenSamples -> SampleDataset -> SampleLoader
                                                                          \\-> EvaluationSamples -> evaluation_batches
    read_records -> preference_of -> PreferenceEncoder -> TokenSamples -> PairDataset -> SampleLoader
                                                                          \\-> EvaluationPairs -> evaluation_batches
"""

from shardwise.data.corpus import Corpus as Corpus, stdlib_corpus as stdlib_corpus
from shardwise.data.encoding import (
    Encoded as Encoded,
    ExampleEncoder as ExampleEncoder,
    UnusableExampleError as UnusableExampleError,
)
from shardwise.data.examples import Example as Example, example_of as example_of
from shardwise.data.labelled import (
    LabelledText as LabelledText,
    Labels as Labels,
    labelled_text_of as labelled_text_of,
    labelled_words_of as labelled_words_of,
    labels_of as labels_of,
)
from shardwise.data.labelled_rows import (
    EncodedTexts as EncodedTexts,
    EvaluationRows as EvaluationRows,
    LabelledRows as LabelledRows,
    encode_labelled as encode_labelled,
)
from shardwise.data.loader import (
    Batch as Batch,
    BatchSchedule as BatchSchedule,
    DataLoader as DataLoader,
    TextWindows as TextWindows,
    Windows as Windows,
    evaluation_batches as evaluation_batches,
)
from shardwise.data.pair_rows import (
    EvaluationPairs as EvaluationPairs,
    PairDataset as PairDataset,
    Preference as Preference,
    PreferenceEncoder as PreferenceEncoder,
    preference_of as preference_of,
)
from shardwise.data.reading import read_corpus as read_corpus, read_records as read_records
from shardwise.data.sample_rows import (
    EvaluationSamples as EvaluationSamples,
    SampleDataset as SampleDataset,
    SampleLoader as SampleLoader,
    TokenSamples as TokenSamples,
)
from shardwise.data.tokens import (
    IGNORE_INDEX as IGNORE_INDEX,
    EvaluationWindows as EvaluationWindows,
    TokenDataset as TokenDataset,
    TokenStream as TokenStream,
)
