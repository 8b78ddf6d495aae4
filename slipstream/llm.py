"""`LLM`: a model in this process, asked with text or token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from slipstream.config import Config, override
from slipstream.engine.build import build
from slipstream.engine.engine import Engine
from slipstream.engine.memory import Plan
from slipstream.request import (
    FinishReason,
    Output,
    Request,
    RequestError,
    SamplingParams,
    Speculation,
    Timing,
    TokenLogprob,
    Usage,
)
from slipstream.text.stop import StopStrings
from slipstream.text.template import Template
from slipstream.text.tokenizer import Incremental, Tokenizer
from slipstream.weights.reader import Checkpoint
from slipstream.weights.sources import open_checkpoint, resolve

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    ``token_ids`` has the end token if one ended the text; ``text`` has neither that nor a stop
    string. ``sources`` says who proposed each token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprob]
    sources: list[str]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt. Counts are sums over them, times those of the last to end."""

    prompt_tokens: list[int]
    completions: list[Completion]
    usage: Usage
    timing: Timing
    speculation: Speculation
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a stream. The last of an answer has `finish`, the last of all `output`."""

    index: int
    text: str
    token_ids: list[int]
    sources: list[str]
    finish: Completion | None = None
    output: RequestOutput | None = None


# What drafters with weights are examined on: prose and code, in plain words.
PROBE = """The cache keeps the keys and values of every token that was read. When a second request
begins with the same text, the engine finds the pages that hold it and starts behind them, so the
first answer comes sooner. The following function returns the length of the common beginning.

def common_prefix(first, second):
    \"\"\"Return how many items two lists have in common at their start.\"\"\"
    count = 0
    for a, b in zip(first, second):
        if a != b:
            break
        count += 1
    return count

The function is called once for each page. If the number it returns is"""


class LLM:
    """A model ready to answer.

    ``LLM("smollm2")``, ``LLM("path/to/checkpoint", limits__seqs=4)``. Not for use from several
    threads at once; `engine.serving.InferenceThread` is.

    Args:
        model: a checkpoint directory, a .gguf file, a built-in name or a hub id; None: the
            config's.
        config: all settings; a default one if None.
        announce: is given the memory plan before any weight is read.
        report: is given a line about each drafter that is left out; None: it is logged.
        settings: settings of the config by name, parts joined by ``__``.

    Raises:
        CheckpointError, TokenizerError, TemplateError, ConfigError: with the next action.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        announce: Callable[[Plan], None] | None = None,
        report: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        changes = {name.replace("__", "."): value for name, value in settings.items()}
        if model is not None:
            changes["model"] = model
        self.config = override(config or Config(), changes)
        checkpoint = open_checkpoint(resolve(self.config.model))
        self.tokenizer, self.template = text_side(checkpoint)
        self.engine: Engine = build(
            self.config,
            checkpoint,
            ends=end_ids(checkpoint, self.tokenizer),
            vocab=self.tokenizer.vocab_size if self.tokenizer else None,
            probe=self.tokenizer.encode(PROBE, begin=True) if self.tokenizer else (),
            announce=announce,
            report=report or logging.getLogger("slipstream").warning,
        )
        for doubt in checkpoint.doubts(self.engine.vocab):
            (report or logging.getLogger("slipstream").warning)(doubt)
        self._numbers = count()
        self._answers: dict[str, _Answer] = {}

    @property
    def plan(self) -> Plan:
        """The memory plan everything was allocated by."""
        assert self.engine.plan is not None
        return self.engine.plan

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.engine.limits.context

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through.

        Raises:
            RequestError: text, and the checkpoint has no tokenizer.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json: give token ids, or add the file"
            )
        return self.tokenizer.encode(prompt, begin=True, most=self.context)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, computed together.

        Args:
            prompts: text, token ids, or a list of either.
            params: for all prompts, or one each.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing was computed then.
        """
        batch = _batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts but {len(each)} sampling parameters: give one each"
            )
        groups = self._submit(
            [(p, s or SamplingParams()) for p, s in zip(batch, each, strict=True)]
        )
        try:
            while any(not a.done for group in groups for a in group):
                self._step()
        finally:
            self._forget(groups)
        return [_result(group) for group in groups]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt, bit by bit. Closing the iterator stops the answer.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        deltas = self._deltas(self._submit([(prompt, params or SamplingParams())]))
        next(deltas)  # runs up to its first yield, so that closing it always ends the request
        return deltas

    def _deltas(self, groups: list[list[_Answer]]) -> Iterator[Delta]:
        [group] = groups
        open_answers = len(group)
        try:
            yield Delta(0, "", [], [])  # taken by `stream`
            while open_answers:
                self._step()
                for answer in group:
                    for delta in answer.take():
                        if delta.finish:
                            open_answers -= 1
                            if not open_answers:
                                delta = replace(delta, output=_result(group))
                        yield delta
        finally:
            self._forget(groups)

    def _submit(self, asked: list[tuple[Prompt, SamplingParams]]) -> list[list[_Answer]]:
        groups: list[list[_Answer]] = []
        requests: list[Request] = []
        for prompt, params in asked:
            tokens = self.encode(prompt)
            if params.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer: use stop_token_ids instead")
            group = []
            for index in range(params.n):
                seed = None if params.seed is None else (params.seed + index) % 2**64
                one = replace(params, n=1, seed=seed)
                request = Request(str(next(self._numbers)), tuple(tokens), one)
                self.engine.check(request)
                requests.append(request)
                group.append(_Answer(request, index, self.tokenizer))
            groups.append(group)
        for request, answer in zip(requests, (a for g in groups for a in g), strict=True):
            self._answers[request.id] = answer
            self.engine.add(request)
        return groups

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except BaseException:
            # Broken off halfway, by Ctrl-C perhaps: nothing under way can be trusted.
            self.engine.clear()
            raise
        for output in outputs:
            answer = self._answers.get(output.id)
            if answer and not answer.done and answer.feed(output) and output.finish is None:
                self.engine.abort(output.id)  # a stop string ended it

    def _forget(self, groups: list[list[_Answer]]) -> None:
        for answer in (a for group in groups for a in group):
            self._answers.pop(answer.request.id, None)
            if not answer.done:
                self.engine.abort(answer.request.id)


class _Answer:
    """One answer being put together."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        self.request, self.index = request, index
        self.decoder = Incremental(tokenizer) if tokenizer else None
        self.stops = StopStrings(request.params.stop)
        self.text = ""
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.reason: int | str | None = None
        self.last = Output(request.id)
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._taken = [0, 0]  # characters and tokens handed out
        self._ended = False

    @property
    def done(self) -> bool:
        return self.finish is not None

    def feed(self, output: Output) -> bool:
        """Take what a step did; whether the answer has ended."""
        self.last = output
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        for i, token in enumerate(output.tokens):
            self.tokens.append(token)
            self.sources.append(output.sources[i])
            self.logprobs += output.logprobs[i : i + 1]
            if self.decoder and self._add(self.decoder.feed([token])):
                return True
        if output.finish:
            if self.decoder and self._add(self.decoder.finish()):
                return True
            self.text += self.stops.finish()
            self.finish, self.reason = output.finish, output.stop_reason
        return self.done

    def _add(self, text: str) -> bool:
        """Append text; whether a stop string ended the answer."""
        emit, hit = self.stops.feed(text)
        self.text += emit
        if hit is not None:
            self.finish, self.reason = "stop", hit
        return hit is not None

    def take(self) -> Iterator[Delta]:
        """What came since the last call."""
        if self._ended or (len(self.tokens) == self._taken[1] and not self.done):
            return
        text, tokens = self.text[self._taken[0] :], self.tokens[self._taken[1] :]
        sources = self.sources[self._taken[1] :]
        self._taken = [len(self.text), len(self.tokens)]
        self._ended = self.done
        yield Delta(self.index, text, tokens, sources, self.completion() if self.done else None)

    def completion(self) -> Completion:
        return Completion(
            self.index,
            self.text,
            self.tokens,
            self.finish,
            self.reason,
            self.logprobs,
            self.sources,
        )


def _result(group: list[_Answer]) -> RequestOutput:
    usages = [a.last.usage for a in group]
    return RequestOutput(
        prompt_tokens=list(group[0].request.tokens),
        completions=[a.completion() for a in group],
        usage=Usage(
            usages[0].prompt_tokens,
            sum(len(a.tokens) for a in group),
            usages[0].cached_tokens,
        ),
        timing=max((a.last.timing for a in group), key=lambda t: t.total),
        speculation=sum((a.last.speculation for a in group), Speculation()),
        prompt_logprobs=group[0].prompt_logprobs,
    )


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(p, int) for p in items):
        return [items]
    if not items:
        raise RequestError("no prompt: give text, token ids, or a list of either")
    for p in items:
        ids = isinstance(p, list | tuple) and all(isinstance(t, int) for t in p)
        if not isinstance(p, str) and not ids:
            raise RequestError(f"a prompt is {p!r}: give text or a list of token ids")
    return items


def text_side(checkpoint: Checkpoint) -> tuple[Tokenizer | None, Template | None]:
    """The tokenizer and chat template of a checkpoint, each None if it has none.

    Raises:
        TokenizerError, TemplateError: they are there, but broken.
    """
    if checkpoint.metadata:
        return Tokenizer.from_gguf(checkpoint.metadata), Template.from_gguf(checkpoint.metadata)
    directory = checkpoint.directory
    has = any(
        (directory / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    )
    tokenizer = Tokenizer.from_directory(directory) if has else None
    return tokenizer, Template.from_directory(directory)


def end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a text: generation_config, else config, else the tokenizer."""
    for source in (checkpoint.generation, checkpoint.config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            found: list[int] = []
            with suppress(ValueError, TypeError):
                found = [int(v) for v in value]
            if found:
                return tuple(found)
    return tokenizer.eos_ids if tokenizer else ()
