"""A model split over ranks, for EleutherAI's lm-evaluation-harness (``pip install 'shardwise[eval]'``).

Every rank runs the harness on all requests in the same order, so that the ranks stay in step. The harness sees a single
process. Log-likelihoods take one forward pass per batch of requests of similar length. Requests that differ only in
their last token share a row of the batch. A prompt reuses the keys and values of its common prefix with the previous
prompt.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shardwise.core.communication.agreement import check_same
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.sharding import balanced_range
from shardwise.data.tokenizer import ChatTemplate, TextStream, Tokenizer
from shardwise.models.generation import GREEDY, PrefixCache, Sampling, generate, sample_next_token
from shardwise.models.generation.cache import CausalModel
from shardwise.models.generation.generation import evaluation_mode
from shardwise.nn.loss.cross_entropy import vocab_parallel_log_probs

_USUAL_MAX_NEW_TOKENS = 256
# The default of transformers.
_USUAL_TOP_K = 50
_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The harness's cache key, the token ids of a context, and the token ids of its continuation."""


class ShardwiseLM:
    """A model for ``lm_eval.simple_evaluate(model=ShardwiseLM(...))``, registered as the harness's ``LM``.

    Every rank of the model's tensor-parallel group creates one.

    Args:
        model: model that is split over tensor-parallel ranks, without pipeline stages.
        tokenizer: tokenizer of the model.
        template: chat template for ``apply_chat_template``; None if the model has none.
        prefix_id: token before a text without a context; None means the token that ends a text.
        eos_ids: tokens that end a text, in addition to the tokenizer's.
        batch_size: rows per forward pass.
        name: name of the tokenizer, which the harness uses to separate its caches.

    Attributes:
        rank, world_size: 0 and 1, because the harness sees all ranks as one process.
        cache_hook: hook that receives each answer.
        eot_token_id, prefix_token_id: token that ends a text, and token before a text without a context.
        max_length: maximum sequence length of the model, in tokens.
        tokenizer_name: name that the harness uses to separate its caches.

    Raises:
        ConfigError: the model is one of several pipeline stages, or the harness is not installed.
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        prefix_id: int | None = None,
        eos_ids: Sequence[int] = (),
        batch_size: int = 8,
        name: str = "shardwise",
    ) -> None:
        harness().register(ShardwiseLM)
        self.cache_hook = import_module("lm_eval.api.model").CacheHook(None)
        if not (model.pre_process and model.post_process):
            raise ConfigError("evaluation needs the whole model on each rank, and this is one pipeline stage of it")
        self.model, self.batch_size, self.max_length = model, batch_size, model.max_sequence_length
        self._tokenizer, self._template, self.tokenizer_name = tokenizer, template, name
        self.eot_token_id = tokenizer.eos_id
        self.prefix_token_id = tokenizer.eos_id if prefix_id is None else prefix_id
        self._eos_ids = tuple(dict.fromkeys((tokenizer.eos_id, *eos_ids)))
        self.device = next(model.parameters()).device

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Set the hook that receives each answer."""
        self.cache_hook = cache_hook

    @property
    def _is_first(self) -> bool:
        return self.model.tp_group.rank() == 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, by default with the tokenizer's leading tokens unless it starts with the prefix token."""
        ids = self._tokenizer.encode(string, parse_special=True)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.decode([self.prefix_token_id]))
        return [*self._tokenizer.beginning, *ids] if add_special_tokens else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's source, which identifies it for the harness; None if ``chat_template`` is false."""
        return self._asked_template().source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format messages with the chat template; without a generation prompt, the last message is left open."""
        text = self._asked_template().render(chat_history, add_generation_prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        start = text.rindex(last.strip())
        # Trailing whitespace belongs to the message, unless the template strips it.
        whole = last.lstrip()
        return text[: start + len(whole if text.startswith(whole, start) else last.strip())]

    def _asked_template(self) -> ChatTemplate:
        if self._template is None:
            raise DataError("the model has no chat template; put chat_template.jinja into its folder")
        return self._template

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each request's continuation after its context, and whether it is greedy."""
        self._check_same(requests)
        encoded = [((first, second), *self._encode_pair(first, second)) for first, second in _arguments(requests)]
        return self._loglikelihood_tokens(encoded, disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of the context, at least one, and the ids of the continuation."""
        if not context:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            return ([self.prefix_token_id], ids) if ids[:1] != [self.prefix_token_id] else (ids[:1], ids[1:])
        # Tokenizers join whitespace with the word that follows it.
        bare = context.rstrip()
        context, continuation = (bare, context[len(bare) :] + continuation) if bare else (context, continuation)
        first = self.tok_encode(context)
        return first, self.tok_encode(context + continuation)[len(first) :]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, computed in windows of the model's maximum length."""
        self._check_same(requests)
        utils = import_module("lm_eval.utils")
        windows: list[Request] = []
        owners: list[int] = []
        for number, (text,) in enumerate(_arguments(requests)):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        # Requests with the same input, whose last tokens may differ, share a row.
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise DataError(
                    f"a text to be measured has {len(continuation)} tokens, and the model reads {self.max_length} at "
                    "once"
                )
            read = (context + continuation)[-(self.max_length + 1) : -1]
            rows.setdefault(tuple(read), []).append(number)
        # The longest first, so that memory runs out at once if at all, and sorted to reduce padding.
        ordered = sorted(rows, key=lambda read: (-len(read), read))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or not self._is_first or None, desc="log-likelihoods")
        with evaluation_mode(self.model), bar:
            for start in range(0, len(ordered), self.batch_size):
                batch = ordered[start : start + self.batch_size]
                numbers = [rows[read] for read in batch]
                for number, answer in self._measure(batch, numbers, requests):
                    answers[number] = answer
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                bar.update(sum(map(len, numbers)))
        return answers

    def _measure(
        self, batch: Sequence[tuple[int, ...]], numbers: Sequence[Sequence[int]], requests: Sequence[Request]
    ) -> list[tuple[int, tuple[float, bool]]]:
        """Return the answers to all requests of a batch of inputs, with the numbers of the requests."""
        longest = len(batch[0])
        # Pad on the right, because a causal model does not attend to later tokens.
        ids = torch.tensor([[*read, *[0] * (longest - len(read))] for read in batch], device=self.device)
        lengths = torch.tensor([len(read) for read in batch], device=self.device)
        logits: Tensor = self.model(ids, lengths=lengths)
        wanted = [
            (row, len(read) - len(requests[number][2]) + place, token)
            for row, (read, several) in enumerate(zip(batch, numbers, strict=True))
            for number in several
            for place, token in enumerate(requests[number][2])
        ]
        places = torch.tensor(wanted, device=self.device)
        scores = logits[places[:, 1], places[:, 0]]
        group, vocab_size = self.model.tp_group, self.model.vocab_size
        assert vocab_size is not None
        if not self.model.parallel_output:
            start, stop = balanced_range(vocab_size, group.size(), group.rank())
            scores = scores[:, start:stop]
        targets = places[:, 2].contiguous()
        likeliest = targets == sample_next_token(
            scores, GREEDY, vocab_size=vocab_size, group=group, generator=torch.Generator()
        )
        log_probs = vocab_parallel_log_probs(scores, targets, group=group, vocab_size=vocab_size)
        counts = [len(requests[number][2]) for several in numbers for number in several]
        return [
            (number, (float(own.sum()), bool(greedy.all())))
            for number, own, greedy in zip(
                (number for several in numbers for number in several),
                log_probs.cpu().split(counts),
                likeliest.cpu().split(counts),
                strict=True,
            )
        ]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to the first stop sequence."""
        self._check_same(requests)
        texts = [""] * len(requests)
        prefix = PrefixCache(self.model)
        # Sorted, so that prompts with a common prefix are consecutive.
        ordered = sorted(range(len(requests)), key=lambda number: str(requests[number].args[0]))
        for number in tqdm(ordered, disable=disable_tqdm or not self._is_first or None, desc="texts"):
            prompt, options = requests[number].args
            texts[number] = self._continue(prompt, options, prefix)
            self.cache_hook.add_partial("generate_until", (prompt, options), texts[number])
        return texts

    def _continue(self, prompt: str, options: Mapping[str, Any], prefix: PrefixCache) -> str:
        utils = import_module("lm_eval.models.utils")
        values = dict(utils.normalize_gen_kwargs(dict(options), _USUAL_MAX_NEW_TOKENS))
        if unknown := sorted(values.keys() - _GENERATION_OPTIONS):
            known = ", ".join(sorted(_GENERATION_OPTIONS))
            raise ConfigError(
                f"the task's generation_kwargs have {unknown[0]!r}, which is not offered; there are {known}"
            )
        stops = utils.handle_stop_sequences(values["until"], eos=self._tokenizer.decode([self.eot_token_id]))
        count = values["max_gen_toks"]
        if not 0 < count < self.max_length:
            raise ConfigError(
                f"the task asks for {count} new tokens; the model reads {self.max_length} at once, prompt included; "
                f"set max_gen_toks from 1 to {self.max_length - 1}"
            )
        prompt_ids = self.tok_encode(prompt)[count - self.max_length :]
        sampling = GREEDY
        if values.get("do_sample") and values["temperature"] > 0:
            sampling = Sampling(values["temperature"], values.get("top_k", _USUAL_TOP_K), values.get("top_p", 1.0))
        stream, said = TextStream(self._tokenizer, prompt_ids), ""

        def look(token: int) -> bool:
            nonlocal said
            said += stream.push(token)
            return any(stop in said for stop in stops if stop)

        new_ids = generate(
            self.model,
            prompt_ids,
            max_new_tokens=count,
            sampling=sampling,
            seed=int(values.get("seed", 0)),
            eos_id=self._eos_ids,
            on_token=look,
            prefix=prefix,
        )
        special = self._tokenizer.special_ids
        text = self._tokenizer.decode([token for token in new_ids if token not in special])
        result: str = utils.postprocess_generated_text(generation=text, stop=stops, think_end_token=None)
        return result

    def _check_same(self, requests: Sequence[Any]) -> None:
        """Check that all ranks have the same requests; otherwise they would hang."""
        digest = hashlib.sha256(repr(_arguments(requests)).encode()).hexdigest()
        check_same(f"{len(requests)} requests, SHA-256 {digest[:12]}", "what to evaluate", group=self.model.tp_group)


def _arguments(requests: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]


def harness() -> Any:
    """Return the base class of the harness's models."""
    try:
        return import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise ConfigError(f"tasks need the package lm_eval ({error}): pip install 'shardwise[eval]'") from error
