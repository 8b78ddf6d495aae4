"""The composition root: the one place where everything is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from slipstream import models
from slipstream.config import Config
from slipstream.draft import loading
from slipstream.draft.fuse import Fuse
from slipstream.draft.lookup import Lookup
from slipstream.engine import examine, memory
from slipstream.engine.batch import Inputs, Limits
from slipstream.engine.cache import Cache
from slipstream.engine.costs import Costs
from slipstream.engine.engine import GREEDY, Engine
from slipstream.engine.params import ENDS, ParamTable
from slipstream.engine.propose import Proposals
from slipstream.engine.protocols import Drafter, Model
from slipstream.engine.scheduler import Drafting, Scheduler
from slipstream.engine.verify import Verify
from slipstream.models.blocks import Loader
from slipstream.models.stores import PerSlot
from slipstream.request import SamplingParams
from slipstream.weights.reader import Checkpoint, CheckpointError


def build(
    config: Config,
    checkpoint: Checkpoint,
    *,
    ends: Iterable[int] = (),
    vocab: int | None = None,
    probe: Sequence[int] = (),
    announce: Callable[[memory.Plan], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> Engine:
    """Put an engine together: the only function that reads a whole Config.

    Args:
        checkpoint: opened, nothing read yet.
        ends: token ids that end a text.
        vocab: real token ids, where the checkpoint has more rows than its tokenizer has tokens.
        probe: token ids of an ordinary text, on which drafters with weights are examined.
        announce: is given the memory plan before any weight is read.
        report: is given a line about each drafter that is left out, and why.

    Raises:
        ConfigError: a setting cannot work. CheckpointError: the checkpoint cannot.
    """
    dtype, device = memory.number_format(config), memory.device_of(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    refuse = _refusal(config.speculation.require_drafter, report)
    outline = memory.outline(config, checkpoint, vocab, refuse)
    sized = memory.sizes(
        config,
        checkpoint,
        outline.stores,
        outline.model.nbytes,
        outline.model.context,
        sum(outline.heads.sizes),
    )
    if announce:
        announce(sized.plan)
    loaded: list[int] = []
    model = models.build(checkpoint, dtype, device, loaded)
    limits = sized.limits
    inputs, params = Inputs(limits, device), ParamTable(limits.slots, device)
    heads = loading.load(
        outline.found,
        model,
        Proposals(params),
        loader=Loader,
        dtype=dtype,
        device=device,
        drafts=limits.drafts,
        vocab=outline.vocab,
        refuse=refuse,
    )
    children: list[Drafter] = []
    if config.speculation.enabled and config.speculation.lookup and limits.drafts:
        shared = config.speculation.shared
        children.append(Lookup(inputs.history, inputs.length, limits.drafts, shared=shared))
    children += heads.each

    def around(children: list[Drafter]) -> Engine:
        return assemble(
            model,
            fused(children, limits, device),
            sized,
            inputs,
            params=params,
            prefix=config.cache.prefix,
            by_text=config.cache.reuse == "text",
            snapshot_every=config.cache.snapshot_every,
            row_cost=config.speculation.row_cost,
            fixed=config.speculation.length or None,
            block=config.speculation.verify == "block",
            ends=tuple(ends),
            vocab=outline.vocab,
            defaults=generation_defaults(checkpoint.generation),
            name=config.model,
        )

    engine = around(children)
    if len(heads.each) == len(outline.heads.each):
        taken = {"drafters": sum(heads.sizes)} if heads.each else {}
        memory.check(
            sized.plan,
            {
                "weights": sum(loaded),
                "pages": engine.cache.nbytes("pages"),
                "slots": engine.cache.nbytes("slots"),
                **taken,
            },
        )
    if probe and heads.each:
        useless = _useless(engine, heads, probe, refuse)
        if useless:
            children = [c for c in children if c not in useless]
            engine = around(children)
    if engine.scheduler.drafting and not config.speculation.row_cost:
        measured = examine.costs(engine, [c for c in children if c.stores])
        engine.scheduler.drafting = replace(engine.scheduler.drafting, costs=measured)
    return engine


def _useless(
    engine: Engine, heads: loading.Heads, probe: Sequence[int], refuse: loading.Refuse
) -> list[Drafter]:
    """Drafters that loaded well and guess badly: damaged, or made for another model."""
    found: list[Drafter] = []
    for head, stood in zip(heads.each, examine.standing(engine, heads.each, probe), strict=True):
        if stood < examine.least(head):
            found.append(head)
            text = (
                f"of its drafts {stood:.2f} a step are right, and {examine.least(head):.2f} is the"
                " least of a drafter that belongs to this model: get the one made for it"
            )
            refuse(head.names[0], CheckpointError(text))
    return found


def fused(children: list[Drafter], limits: Limits, device: torch.device) -> Drafter | None:
    """One drafter out of any number, the lookup among them filling the tail."""
    if len(children) < 2:
        return children[0] if children else None
    tail = next((c for c in children if isinstance(c, Lookup)), None)
    return Fuse(*children, slots=limits.slots, tail=tail, device=device)


def _refusal(required: bool, report: Callable[[str], None] | None) -> loading.Refuse:
    """What happens to a drafter that does not work: an error if one is required, else a line."""

    def refuse(name: str, error: CheckpointError) -> None:
        if required:
            raise error
        if report:
            report(f"running without the {name} drafter: {error}")

    return refuse


def generation_defaults(generation: dict[str, object]) -> SamplingParams:
    """Sampling parameters of a checkpoint's generation_config.json.

    Greedy unless it says otherwise: ``do_sample``, or a temperature, top_k or top_p of its own.
    """

    def number(key: str, low: float, high: float, default: float) -> float:
        """The value if it is a number with low < value <= high, else the default."""
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and low < value <= high:
            return float(value)
        return default

    filters = any(generation.get(k) is not None for k in ("temperature", "top_k", "top_p"))
    if not generation.get("do_sample", filters):
        return replace(GREEDY, repetition_penalty=number("repetition_penalty", 0, 100, 1.0))
    return SamplingParams(
        temperature=max(0.0, number("temperature", -1, 100, 1.0)),
        top_k=int(number("top_k", 0, 1e6, 0)),
        top_p=number("top_p", 0, 1, 1.0),
        min_p=number("min_p", 0, 1, 0.0),
        repetition_penalty=number("repetition_penalty", 0, 100, 1.0),
    )


def assemble(
    model: Model,
    drafter: Drafter | None,
    sized: memory.Sizes,
    inputs: Inputs,
    *,
    prefix: bool = True,
    by_text: bool = True,
    snapshot_every: int = 1024,
    params: ParamTable | None = None,
    row_cost: float = 0.08,
    fixed: int | None = None,
    block: bool = False,
    ends: tuple[int, ...] = (),
    vocab: int | None = None,
    defaults: SamplingParams | None = None,
    name: str = "",
    poison: bool = False,
    seed: int | None = None,
) -> Engine:
    """An engine around a model and a drafter that exist already.

    ``params``: the table that the drafter draws by, if it looks at one. ``row_cost``: see
    `Costs.flat`. ``fixed``: see `Drafting`. ``block``: see `Verify`.
    """
    limits, device = sized.limits, sized.device
    stores = model.stores + (drafter.stores if drafter else ())
    cache = Cache(
        stores,
        limits,
        sized.pages,
        sized.dtype,
        device,
        prefix=max(sized.snapshots, 1) if prefix else None,
        by_text=by_text,
        poison=poison,
    )
    stateful = any(isinstance(s, PerSlot) for s in stores)
    drafting = None
    if drafter:
        drafter.bind(cache, len(model.stores))
        drafting = Drafting(Costs.flat(row_cost), drafter.names, drafter.reach, fixed)
    scheduler = Scheduler(
        limits,
        cache,
        snapshot_every=snapshot_every if prefix and stateful else 0,
        drafting=drafting,
        keep_generated=by_text,
    )
    params = params or ParamTable(limits.slots, device)
    vocab = vocab or model.vocab
    ends = tuple(e for e in ends if 0 <= e < vocab)
    return Engine(
        model=model,
        drafter=drafter,
        limits=limits,
        cache=cache,
        inputs=inputs,
        params=params,
        verify=Verify(params, vocab if vocab < model.vocab else None, block),
        scheduler=scheduler,
        ends=ends[:ENDS],
        vocab=vocab,
        defaults=defaults or GREEDY,
        plan=sized.plan,
        name=name,
        seed=seed,
    )
