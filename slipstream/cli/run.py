"""`slipstream run`: one prompt, one answer, then exit."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.drafts import Painter, legend, summary, wants_colour
from slipstream.cli.settings import Debug, with_config
from slipstream.config import Config
from slipstream.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import LLM, RequestOutput


def register(app: typer.Typer) -> None:
    app.command(no_args_is_help=True)(with_config(run))


def run(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="- reads it from standard input.")
    ],
    config: Config,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the answer at most; default: to the context's end."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the checkpoint's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 is off.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampled text repeatable, whatever the drafter or load."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end token, up to --max-tokens.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities with this many alternatives a token."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without a chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour each token by who drafted it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt.

    The text streams to standard output; a line of statistics goes to standard error.
    """
    if raw and system is not None:
        raise RequestError("--raw gives the prompt as it is: leave out --system")
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs is part of the JSON object: add --json")
    if show_drafts and as_json:
        raise RequestError("--show-drafts colours streamed text: leave out --json")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty: give some text")

    began = time.perf_counter()
    from slipstream.llm import LLM

    llm = LLM(
        config=config, announce=lambda plan: print(_dim(plan.line), file=sys.stderr, flush=True)
    )
    load = time.perf_counter() - began
    asked = _prompt(llm, text, system, raw)
    if as_json:
        [output] = llm.generate([asked], params)
        print(json.dumps(_record(llm, config, output, load), ensure_ascii=False))
    else:
        output = _stream(llm, asked, params, _painter(llm) if show_drafts else None)
        print(_dim(_summary(output, load)), file=sys.stderr)
        if show_drafts:
            print(_dim(summary(output.speculation)), file=sys.stderr)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error


def _prompt(llm: LLM, text: str, system: str | None, raw: bool) -> str | list[int]:
    """The prompt as the engine takes it: text to be encoded as it is, or a rendered chat's ids."""
    if llm.tokenizer is None:
        raise RequestError(
            "this checkpoint has no tokenizer: add its tokenizer.json, "
            "or use slipstream.LLM with token ids"
        )
    if raw or llm.template is None:
        if system is not None:
            raise RequestError("this checkpoint has no chat template: leave out --system")
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return llm.tokenizer.encode(llm.template.render(messages), most=llm.context)


def _painter(llm: LLM) -> Painter:
    """Colours for the answer; the legend is printed at once."""
    from slipstream.text.tokenizer import Incremental

    assert llm.tokenizer is not None, "the prompt was encoded with it"
    print(legend(wants_colour(sys.stderr)), file=sys.stderr, flush=True)
    return Painter(Incremental(llm.tokenizer), wants_colour(sys.stdout))


def _stream(
    llm: LLM, asked: str | list[int], params: SamplingParams, painter: Painter | None = None
) -> RequestOutput:
    output: RequestOutput | None = None
    last = "\n"
    for delta in llm.stream(asked, params):
        if delta.text:
            last = delta.text[-1]
        text = painter.feed(delta.text, delta.token_ids, delta.sources) if painter else delta.text
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
        output = delta.output or output
    if last != "\n":
        print(flush=True)
    assert output is not None, "a stream ends with its output"
    return output


def _speeds(output: RequestOutput) -> tuple[float, float]:
    """Tokens per second of the answer after its first token, and of the computed prompt."""
    usage, timing = output.usage, output.timing
    decode = timing.total - timing.first_token
    prefill = timing.first_token - timing.queued
    new = usage.prompt_tokens - usage.cached_tokens
    return (
        (usage.completion_tokens - 1) / decode if decode > 0 else 0.0,
        new / prefill if prefill > 0 else 0.0,
    )


def _record(llm: LLM, config: Config, output: RequestOutput, load: float) -> dict[str, Any]:
    """The JSON object. Times in seconds unless the name says ms."""
    [completion] = output.completions
    timing, spec = output.timing, output.speculation
    decode, prefill = _speeds(output)
    record: dict[str, Any] = {
        "model": config.model,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
        "timing": {
            "load_s": round(load, 4),
            "ttft_ms": round(timing.first_token * 1e3, 2),
            "total_s": round(timing.total, 4),
            "tokens_per_s": round(decode, 2),
            "prompt_tokens_per_s": round(prefill, 2),
        },
        "speculation": {
            "tokens_per_step": round(spec.tokens_per_step, 4),
            "steps": spec.steps,
            "drafted": spec.drafted,
            "accepted": spec.accepted,
            "accepted_by_source": dict(spec.accepted_by_source),
        },
    }
    if completion.logprobs and llm.tokenizer:
        record["logprobs"] = [
            {
                "token": entry.token,
                "text": llm.tokenizer.token_bytes(entry.token).decode(errors="replace"),
                "logprob": entry.logprob,
                "rank": entry.rank,
                "top": [{"token": token, "logprob": logprob} for token, logprob in entry.top],
            }
            for entry in completion.logprobs
        ]
    return record


def _summary(output: RequestOutput, load: float) -> str:
    usage, timing = output.usage, output.timing
    decode, _ = _speeds(output)
    return (
        f"{usage.completion_tokens} tokens at {decode:.1f} tokens/s"
        f" ({output.speculation.tokens_per_step:.2f} a step)"
        f" · first token after {timing.first_token * 1e3:.0f} ms"
        f" · prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached"
        f" · loaded in {load:.1f} s"
    )


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
