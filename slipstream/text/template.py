"""From messages to the prompt text that a model was trained on.

Owns the Jinja environment, the shape of messages and the names of reasoning efforts. A checkpoint's
template is someone else's program: it runs in a sandbox, and its errors become ours.
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# What to try, in order, for an effort that a template refuses or does not know. An entry is usable
# if the template mentions its names; nothing usable leaves the effort out.
_EFFORTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "none": ({"enable_thinking": False}, {"reasoning_effort": "low"}),
    "minimal": ({"reasoning_effort": "low"}, {"enable_thinking": False}),
    "low": ({"reasoning_effort": "medium"},),
    "medium": (),
    "high": ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "medium"}),
    "xhigh": ({"reasoning_effort": "high"},),
    "max": ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
}
_TEXT_PARTS = ("text", "input_text", "output_text")

# What one rendering may take. A conversation of 10 000 messages passes some 50 000 turns of loops.
TURNS = 2_000_000  # of loops and calls of macros together: seconds
CHARACTERS = 2**27  # of one text: four times the body that the server takes
INDENT = 16  # spaces a level of JSON
_BUDGET = " turns"  # in the context; no name of a template can have a space


class TemplateError(ValueError):
    """Messages that cannot be rendered, or a template that cannot be used; the text says why."""


class Template:
    """One model's chat form.

    Attributes:
        source: the Jinja text for messages without tools.
        names: all named variants; ``tool_use``, if there, is for messages with tools.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special: Mapping[str, str] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """Compile a template, or several by name.

        special: names that templates know special tokens by, ``bos_token`` and the like.
        now: the clock behind ``strftime_now``.

        Raises:
            TemplateError: a syntax error, or no ``default`` among the names.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise TemplateError(
                f"the chat templates are named {', '.join(sorted(sources)) or 'nothing'}: one must be 'default'"
            )
        self.source = sources["default"]
        self.names = frozenset(sources)
        self._special = dict(special or {})
        environment = _environment(now)
        try:
            self._compiled = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has a syntax error in line {error.lineno} ({error.message}): "
                f"correct it or give another template"
            ) from None
        self._efforts: dict[str, dict[str, Any]] = {}

    @classmethod
    def from_directory(cls, path: Path) -> Template | None:
        """The template of a checkpoint directory; None if it has none, as base models do.

        Looked for in chat_template.jinja (others by name in additional_chat_templates/), then in
        tokenizer_config.json, then in chat_template.json.

        Raises:
            TemplateError: a file that cannot be read, or a syntax error.
        """
        settings = _read_object(path / "tokenizer_config.json")
        special = {
            key: text
            for key, value in settings.items()
            if key.endswith("_token") and (text := _content(value)) is not None
        }
        file = path / "chat_template.jinja"
        if file.is_file():
            sources = {
                f.stem: _read(f) for f in sorted(path.glob("additional_chat_templates/*.jinja"))
            }
            return cls({**sources, "default": _read(file)}, special)
        for holder in (settings, _read_object(path / "chat_template.json")):
            value = holder.get("chat_template")
            if isinstance(value, str):
                return cls(value, special)
            if isinstance(value, list) and value:
                try:
                    return cls({str(v["name"]): str(v["template"]) for v in value}, special)
                except (TypeError, KeyError):
                    raise TemplateError(
                        f"the list of chat templates in {path} has an entry without name or template: "
                        f"download tokenizer_config.json again"
                    ) from None
        return None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Template | None:
        """The template inside a GGUF file, from its key-value pairs; None if it has none.

        Raises:
            TemplateError: a syntax error.
        """
        prefix = "tokenizer.chat_template"
        sources = {
            "default" if key == prefix else key[len(prefix) + 1 :]: value
            for key, value in metadata.items()
            if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
        }
        if not sources:
            return None
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            number = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(number, int) and 0 <= number < len(tokens):
                special[f"{name}_token"] = str(tokens[number])
        return cls(sources, special)

    @classmethod
    def qwen(cls) -> Template:
        """The Qwen3.8 form, for a checkpoint of that family that came without its template."""
        return cls(
            importlib.resources.files("slipstream.text").joinpath("qwen.jinja").read_text("utf-8")
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text.

        messages: as in the OpenAI API; text parts are joined by newlines, ``developer`` is
        ``system``, arguments of tool calls may be JSON text.
        kwargs: whatever else the template knows (``enable_thinking``, ``preserve_thinking``,
        ...); None leaves the template its default. A ``reasoning_effort`` of the OpenAI API that
        the template refuses becomes the nearest one that it takes.

        Raises:
            TemplateError: the template's own complaint, messages it cannot be given, or more than
                `TURNS` turns of loops or `CHARACTERS` characters.
        """
        given = {key: value for key, value in kwargs.items() if value is not None}
        effort = given.get("reasoning_effort")
        if isinstance(effort, str) and effort in _EFFORTS:
            del given["reasoning_effort"]
            given = {**self._effort(effort), **given}
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        context = {
            **self._special,
            **given,
            "messages": normalize(messages),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _rendered(self._compiled[name], context)
        except TemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(
                f"the chat template does what the sandbox forbids: {error}"
            ) from None
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template refuses these messages: {error.message}"
            ) from None
        except Exception as error:  # a foreign program: anything can come out of it
            raise TemplateError(
                f"the chat template fails on these messages ({type(error).__name__}: {error}): "
                f"check them against the model's documentation"
            ) from None

    def mentions(self, variable: str) -> bool:
        """Whether the template uses a name, such as ``enable_thinking``."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def _effort(self, effort: str) -> dict[str, Any]:
        """What to give the template for an effort of the OpenAI API; probed once."""
        if effort not in self._efforts:
            tries = ({"reasoning_effort": effort}, *_EFFORTS[effort])
            usable = (t for t in tries if all(map(self.mentions, t)) and self._takes(t))
            self._efforts[effort] = next(usable, {})
        return self._efforts[effort]

    def _takes(self, kwargs: Mapping[str, Any]) -> bool:
        context = {
            **self._special,
            **kwargs,
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": None,
            "add_generation_prompt": True,
        }
        try:
            _rendered(self._compiled["default"], context)
        except Exception:
            return False
        return True


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one shape that templates are written for.

    Every ``content`` is a string; leading system and developer messages are one; arguments of tool
    calls are mappings; ``reasoning`` is called ``reasoning_content``.

    Raises:
        TemplateError: no messages, a part that is not text, or arguments that are not an object.
    """
    if not messages:
        raise TemplateError("there are no messages: give at least one user message")
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"message {i} has no role: give user, assistant, system or tool")
        new = {**message, "content": _text(message.get("content"), i)}
        if new["role"] == "developer":
            new["role"] = "system"
        if new.get("reasoning_content") is None and isinstance(new.get("reasoning"), str):
            new["reasoning_content"] = new["reasoning"]
        if message.get("tool_calls"):
            new["tool_calls"] = [_call(call, i) for call in message["tool_calls"]]
        if out and new["role"] == "system" and all(m["role"] == "system" for m in out):
            out[-1]["content"] = "\n\n".join(filter(None, (out[-1]["content"], new["content"])))
        else:
            out.append(new)
    return out


def _text(content: Any, i: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TemplateError(
            f"message {i} has content of type {type(content).__name__}: give a string or a list of text parts"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise TemplateError(
                f"message {i} has a part of type {kind!r}, and this model is given text only: "
                f"send parts of type 'text'"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, i: int) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise TemplateError(
            f"message {i} has a tool call that is not an object: give function and arguments"
        )
    new = dict(call)
    holder = new
    if isinstance(call.get("function"), Mapping):
        holder = new["function"] = dict(call["function"])
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(
            f"message {i} calls {holder.get('name')!r} with arguments that are not a JSON object: correct them"
        )
    holder["arguments"] = dict(arguments)
    return new


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _rendered(compiled: jinja2.Template, context: Mapping[str, Any]) -> str:
    return compiled.render({**context, _BUDGET: [TURNS]})


@jinja2.pass_context
def _turn(context: Context) -> bool:
    """Count one turn of a loop or call of a macro against the rendering's budget."""
    budget = context.parent[_BUDGET]
    budget[0] -= 1
    if budget[0] < 0:
        raise TemplateError(
            f"the chat template takes more than {TURNS} turns of its loops on these messages: "
            f"send fewer messages or arguments, or give another template"
        )
    return True


def _bounded(length: int) -> None:
    if length > CHARACTERS:
        raise TemplateError(
            f"the chat template makes a text of {length} characters, and {CHARACTERS} is the most: "
            f"send less text, or give another template"
        )


def _join(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _bounded(sum(map(len, texts)))
    return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose programs end, in bounded time and memory.

    Jinja bounds a ``range`` and nothing else: loops in loops, macros that call themselves and
    texts that double would stop a thread for good.
    """

    intercepted_binops = frozenset({"+", "*", "**"})
    turn = staticmethod(_turn)
    join = staticmethod(lambda *parts: _join(parts))
    concat = staticmethod(_join)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(v, int | float) and abs(v) < 1024 for v in (left, right)):
                raise TemplateError(
                    f"the chat template computes {left!r:.40} ** {right!r:.40}: "
                    f"give one that keeps to small numbers"
                )
        elif operator == "+":
            _bounded(_size(left) + _size(right))
        else:
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(items, str | list | tuple):
                    _bounded(len(items) * times)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's hook between a parsed template and its code: turns are counted from here on."""

        def counted(at: nodes.Node) -> nodes.Call:
            made = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            return made.set_lineno(at.lineno).set_environment(self)  # type: ignore[return-value]

        _Joins(self).visit(source)
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            node.body.insert(0, nodes.ExprStmt(counted(node), lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:  # runs where the body may not
                node.test = nodes.And(counted(node), node.test, lineno=node.lineno)
        return super()._generate(source, *args, **kwargs)


class _Joins(NodeTransformer):
    """``a ~ b`` as a call that looks at the length."""

    def __init__(self, environment: _Sandbox) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        made = nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None)
        return made.set_lineno(node.lineno).set_environment(self._environment)


def _environment(now: Callable[[], datetime.datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes <, > and & for HTML, which no model was trained on.
        if _size(indent) > INDENT or (isinstance(indent, int) and indent > INDENT):
            raise TemplateError(
                f"the chat template asks for JSON indented by {indent!r:.40}: "
                f"give one that indents by at most {INDENT} spaces"
            )
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file} cannot be read ({error}): download it again") from None


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{file} is not JSON ({error}): download it again") from None
    return value if isinstance(value, dict) else {}


def _content(value: Any) -> str | None:
    """A special token is a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
