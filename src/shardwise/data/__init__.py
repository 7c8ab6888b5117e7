"""From text to batches: corpus, tokens, samples, and the order in which they are seen.

::

    read_corpus / stdlib_corpus -> Corpus.split -> TokenStream -> TokenDataset      -> DataLoader
                                                              \\-> EvaluationWindows -> evaluation_batches
    read_records -> example_of -> ExampleEncoder -> TokenSamples -> SampleDataset -> SampleLoader
                                                                          \\-> EvaluationSamples -> evaluation_batches
    read_records -> preference_of -> PreferenceEncoder -> TokenSamples -> PairDataset -> SampleLoader
                                                                          \\-> EvaluationPairs -> evaluation_batches
"""

from shardwise.data.corpus import Corpus as Corpus
from shardwise.data.dataset import IGNORE_INDEX as IGNORE_INDEX
from shardwise.data.dataset import EvaluationWindows as EvaluationWindows
from shardwise.data.dataset import TokenDataset as TokenDataset
from shardwise.data.encoding import Encoded as Encoded
from shardwise.data.encoding import ExampleEncoder as ExampleEncoder
from shardwise.data.encoding import UnusableExampleError as UnusableExampleError
from shardwise.data.examples import Example as Example
from shardwise.data.examples import example_of as example_of
from shardwise.data.labelled import LabelledText as LabelledText
from shardwise.data.labelled import Labels as Labels
from shardwise.data.labelled import labelled_text_of as labelled_text_of
from shardwise.data.labelled import labelled_words_of as labelled_words_of
from shardwise.data.labelled import labels_of as labels_of
from shardwise.data.labelled_rows import EncodedTexts as EncodedTexts
from shardwise.data.labelled_rows import EvaluationRows as EvaluationRows
from shardwise.data.labelled_rows import LabelledRows as LabelledRows
from shardwise.data.labelled_rows import encode_labelled as encode_labelled
from shardwise.data.loader import Batch as Batch
from shardwise.data.loader import BatchSchedule as BatchSchedule
from shardwise.data.loader import DataLoader as DataLoader
from shardwise.data.loader import TextWindows as TextWindows
from shardwise.data.loader import Windows as Windows
from shardwise.data.loader import evaluation_batches as evaluation_batches
from shardwise.data.pair_rows import EvaluationPairs as EvaluationPairs
from shardwise.data.pair_rows import PairDataset as PairDataset
from shardwise.data.preferences import Preference as Preference
from shardwise.data.preferences import PreferenceEncoder as PreferenceEncoder
from shardwise.data.preferences import preference_of as preference_of
from shardwise.data.reading import read_corpus as read_corpus
from shardwise.data.reading import read_records as read_records
from shardwise.data.sample_rows import EvaluationSamples as EvaluationSamples
from shardwise.data.sample_rows import SampleDataset as SampleDataset
from shardwise.data.sample_rows import SampleLoader as SampleLoader
from shardwise.data.sample_rows import TokenSamples as TokenSamples
from shardwise.data.stdlib import stdlib_corpus as stdlib_corpus
from shardwise.data.tokens import TokenStream as TokenStream
