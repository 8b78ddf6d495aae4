"""From messages to the prompt text that a model was trained on.

Owns the Jinja environment, the shape of messages and the names of reasoning efforts. A checkpoint's
template is someone else's program: it runs in a sandbox, and its errors become ours.
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
            TemplateError: the template's own complaint, or messages it cannot be given.
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
            return self._compiled[name].render(context)
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
            self._compiled["default"].render(context)
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


def _environment(now: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes <, > and & for HTML, which no model was trained on.
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
