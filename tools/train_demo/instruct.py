"""Generated conversations: a few kinds of instruction, answered from text by rule.

Every answer follows from the prompt alone (copying, selecting, filling), so a small model can learn
the kinds. `conversation` draws one kind; a kind that does not fit the drawn text returns None and
another is drawn.
"""

from __future__ import annotations

import ast
import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Draw = Callable[[str], str]  # "docs" or "code" -> text of a random document slice


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


REPEAT = (
    "Repeat this text exactly:",
    "Repeat the following text:",
    "Copy this text word for word:",
    "Copy the text below exactly.",
    "Write out the following text again, unchanged:",
    "Please repeat this:",
    "Repeat this text.",
    "Echo this back to me:",
    "Say this again, exactly as it is:",
    "Return the following text unchanged.",
    "Reproduce this text verbatim:",
    "Type this out again:",
    "Repeat after me:",
    "Copy:",
    "Give me back this exact text:",
    "Repeat the text below without changes:",
)
REPEAT_AFTER = (
    "Repeat the text above.",
    "Repeat this text exactly.",
    "Copy the text above word for word.",
    "Now write that text again, unchanged.",
    "Please repeat it exactly.",
    "Repeat it.",
)
READ = (
    "Read this text:",
    "Here is a text:",
    "Remember this text.",
    "Keep this in mind:",
    "This is the text:",
)
HAVE_READ = ("I have read it.", "Understood.", "Okay.", "I have read the text.", "Noted.")
REPEAT_EARLIER = (
    "Repeat the text from above.",
    "Now repeat the text exactly.",
    "Repeat the text that I gave you first.",
    "Write out the text from the beginning of our conversation.",
    "Please copy that text word for word.",
)


def random_line(rng: random.Random) -> str:
    """A line of rare material: hex, identifiers, numbers, paths, mixed words."""
    kind = rng.randrange(7)
    if kind == 0:
        return "".join(rng.choices("0123456789abcdef", k=rng.randint(4, 40)))
    if kind == 1:
        parts = (8, 4, 4, 4, 12)
        return "-".join("".join(rng.choices("0123456789abcdef", k=n)) for n in parts)
    if kind == 2:
        return " ".join(
            str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 12))
        )
    if kind == 3:
        return "/" + "/".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(4)
        )
    if kind == 4:
        return "".join(
            rng.choices(string.ascii_letters + string.digits + "_-.", k=rng.randint(6, 40))
        )
    if kind == 5:
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9))) for _ in range(8)
        )
    return f"{rng.choice(NAMES)}_{rng.randint(0, 999)} = {rng.uniform(-100, 100):.{rng.randint(1, 6)}f}"


NAMES = (
    "alpha",
    "beta",
    "cache",
    "client",
    "cursor",
    "engine",
    "filter",
    "gateway",
    "handler",
    "index",
    "journal",
    "kernel",
    "loader",
    "manager",
    "node",
    "output",
    "parser",
    "queue",
    "router",
    "server",
    "table",
    "upload",
    "vector",
    "worker",
    "buffer",
    "socket",
    "thread",
    "session",
    "scheduler",
    "storage",
    "backup",
    "monitor",
)
PEOPLE = (
    "Ada",
    "Ben",
    "Chen",
    "Dara",
    "Elif",
    "Femi",
    "Gita",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mina",
    "Noor",
    "Omar",
    "Pia",
    "Quinn",
    "Rosa",
    "Sami",
    "Tara",
    "Uma",
    "Vera",
    "Wim",
    "Yara",
    "Zoe",
    "Anna",
    "Luca",
    "Maya",
)
PLACES = (
    "Lisbon",
    "Oslo",
    "Nairobi",
    "Kyoto",
    "Lima",
    "Quito",
    "Riga",
    "Porto",
    "Delhi",
    "Cairo",
    "Turin",
    "Accra",
    "Graz",
    "Bergen",
    "Hanoi",
    "Sofia",
    "Malmo",
    "Leeds",
    "Basel",
    "Dakar",
    "Paris",
    "Berlin",
    "Madrid",
    "Rome",
)
COMMANDS = (
    "git clone {u}",
    "git checkout -b {n}",
    "pip install {n}",
    "python -m {n} --port {d}",
    "docker run {n}",
    "cd {n}",
    "make {n}",
    "npm install {n}",
    "cargo build --release",
    "kubectl get pods",
    "systemctl restart {n}",
    "mkdir -p /opt/{n}",
    "cp {n}.conf /etc/{n}/",
    "tar xzf {n}-{d}.tar.gz",
    "curl -O {u}",
    "psql -d {n}",
    "pytest tests/test_{n}.py",
    "rm -rf build/{n}",
    "ls -l /var/log/{n}",
    "export PORT={d}",
    "chmod +x {n}.sh",
)


def _command(rng: random.Random) -> str:
    name = rng.choice(NAMES)
    return rng.choice(COMMANDS).format(
        n=name, d=rng.randint(10, 9999), u=f"https://example.org/{rng.choice(NAMES)}/{name}.git"
    )


def paragraphs(text: str) -> list[str]:
    """Prose paragraphs of a document: no code, headings or tables."""
    found = []
    for part in re.split(r"\n\s*\n", text):
        flat = re.sub(r"\s*\n\s*", " ", part.strip())
        good = 60 <= len(flat) <= 700 and flat[0].isupper() and flat[-1] in ".:" and "|" not in flat
        if good and not re.search(r"```|^[#.=\-*>]|::$|\{|\}", flat) and flat.count(" ") > 8:
            found.append(flat)
    return found


def _intro(rng: random.Random, options: tuple[str, ...], text: str) -> str:
    ask = rng.choice(options)
    if rng.random() < 0.25:
        ask = ask[0].lower() + ask[1:] if rng.random() < 0.5 else ask.rstrip(":.")
    return f"{ask}\n\n{text}" if rng.random() < 0.75 else f"{text}\n\n{ask.rstrip(':')}"


def repeat(rng: random.Random, draw: Draw) -> Messages | None:
    """Repeat a short text, a list, code or rare strings."""
    kind = rng.randrange(5)
    if kind == 0:
        text = "\n".join(random_line(rng) for _ in range(rng.randint(1, 12)))
    elif kind == 1:
        found = paragraphs(draw("docs"))
        if not found:
            return None
        text = "\n\n".join(rng.sample(found, min(len(found), rng.randint(1, 4))))
    elif kind == 2:
        text = "\n".join(draw("code").split("\n")[: rng.randint(3, 40)]).strip("\n")
        text = f"```python\n{text}\n```" if rng.random() < 0.5 else text
    elif kind == 3:
        words = draw("docs").split()
        text = " ".join(words[: rng.randint(1, 30)])
    else:
        text = draw("docs")[: rng.randint(100, 3000)].strip()
    if not text.strip():
        return None
    text = text.strip()
    if rng.random() < 0.15:
        return [
            _user(_intro(rng, REPEAT, text)),
            _assistant(text),
            _user(rng.choice(("Again.", "Once more, please.", "Repeat it again."))),
            _assistant(text),
        ]
    return [
        _user(
            f"{rng.choice(REPEAT)}\n\n{text}"
            if rng.random() < 0.7
            else f"{text}\n\n{rng.choice(REPEAT_AFTER)}"
        ),
        _assistant(text),
    ]


def list_commands(rng: random.Random, draw: Draw) -> Messages | None:
    """List the commands that a text mentions, in order."""
    count = rng.randint(1, 7)
    commands = list(dict.fromkeys(_command(rng) for _ in range(count)))
    steps = (
        "First run `{}`.",
        "Then run `{}`.",
        "After that, use `{}` to continue.",
        "Next, type `{}`.",
        "When this is done, call `{}`.",
        "Now run `{}` in the same directory.",
        "Finally, run `{}`.",
        "If it fails, try `{}` instead.",
        "You may also need `{}`.",
    )
    filler = paragraphs(draw("docs"))[:12]
    parts: list[str] = []
    fenced = rng.random() < 0.4
    for command in commands:
        if filler and rng.random() < 0.4:
            parts.append(filler.pop(rng.randrange(len(filler))).replace("`", ""))
        parts.append(f"```\n{command}\n```" if fenced else rng.choice(steps).format(command))
    text = "\n\n".join(parts)
    ask = (
        "List the commands in this text.",
        "List the commands in it.",
        "Which commands does this text contain?",
        "List all commands from the text below:",
        "What commands are used here?",
        "Extract the commands:",
    )
    return [_user(_intro(rng, ask, text)), _assistant("\n".join(f"- `{c}`" for c in commands))]


def _sections(text: str) -> list[tuple[str, str]]:
    """(heading, body) of a Markdown document."""
    parts = re.split(r"(?m)^#{1,6} (.+)$", text)
    return [(h.strip(" `"), b.strip()) for h, b in zip(parts[1::2], parts[2::2], strict=True)]


def shorten(rng: random.Random, draw: Draw) -> Messages | None:
    """Shorten a text to the first sentence of each paragraph and keep the code."""
    found = paragraphs(draw("docs"))
    long = [p for p in found if p.count(". ") >= 1]
    if len(long) < 2:
        return None
    chosen = long[: rng.randint(1, 4)]
    source = draw("code")
    block = "\n".join(source.split("\n")[: rng.randint(2, 14)]).strip("\n")
    if "```" in block or not block.strip():
        return None
    code = f"```python\n{block}\n```"
    place = rng.randint(0, len(chosen))
    short = [re.split(r"(?<=[.:]) ", p)[0] for p in chosen]
    ask = (
        "Shorten this text but keep the code.",
        "Shorten this but keep the code:",
        "Make this shorter. Keep the code.",
        "Summarize this text and leave the code as it is.",
        "Shorten the text below; the code must stay unchanged.",
    )
    text = "\n\n".join([*chosen[:place], code, *chosen[place:]])
    return [
        _user(_intro(rng, ask, text)),
        _assistant("\n\n".join([*short[:place], code, *short[place:]])),
    ]


def quote(rng: random.Random, draw: Draw) -> Messages | None:
    """Quote the passage about a topic."""
    sections = [
        (h, p[0]) for h, b in _sections(draw("docs")) if (p := paragraphs(b)) and len(h) < 60
    ]
    if len(sections) < 2:
        found = paragraphs(draw("docs"))
        sections = []
        for p in found:
            rare = list(re.findall(r"`([\w.\-]{3,30})`|\b([a-z]+_[a-z_]+)\b", p))
            topic = next((a or b for a, b in rare), None)
            if topic and sum(topic in q for q in found) == 1:
                sections.append((topic, p))
        with_heads = False
    else:
        with_heads = rng.random() < 0.6
    if len(sections) < 2:
        return None
    sections = sections[: rng.randint(2, 6)]
    topic, passage = rng.choice(sections)
    if not with_heads and not any(topic.lower() in p.lower() for _, p in sections):
        with_heads = True
    text = "\n\n".join(f"## {h}\n\n{p}" if with_heads else p for h, p in sections)
    ask = (
        f"Quote the passage about {topic}.",
        f"Quote the paragraph about {topic}.",
        f"What does the text say about {topic}? Quote it.",
        f"Find the passage about {topic} and quote it.",
    )
    return [_user(_intro(rng, ask, text)), _assistant(f"> {passage}")]


def _typo(rng: random.Random, word: str) -> str:
    i = rng.randrange(len(word) - 1)
    kind = rng.randrange(3)
    if kind == 0 and word[i] != word[i + 1]:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if kind == 1:
        return word[:i] + word[i + 1 :]
    return word[: i + 1] + word[i] + word[i + 1 :]


def fix_typo(rng: random.Random, draw: Draw) -> Messages | None:
    """Fix one or two misspelt words in a passage."""
    found = paragraphs(draw("docs"))
    if not found:
        return None
    text = rng.choice(found)
    words = text.split(" ")
    places = [i for i, w in enumerate(words) if w.isalpha() and len(w) >= 5 and w.islower()]
    if len(places) < 2:
        return None
    wrong = list(words)
    for i in rng.sample(places, rng.randint(1, 2)):
        wrong[i] = _typo(rng, words[i])
    ask = (
        "Fix the typo:",
        "Fix the typos in this text.",
        "Correct the spelling:",
        "Correct the typo in this sentence:",
        "There is a typo in this text. Fix it.",
    )
    return [_user(_intro(rng, ask, " ".join(wrong))), _assistant(text)]


FIELDS: dict[str, tuple[str, Callable[[random.Random], Any]]] = {
    "name": ("The name is {}.", lambda r: r.choice(PEOPLE)),
    "city": ("The city is {}.", lambda r: r.choice(PLACES)),
    "port": ("It listens on port {}.", lambda r: r.randint(80, 65535)),
    "host": ("The host is {}.", lambda r: f"{r.choice(NAMES)}.example.org"),
    "version": (
        "The version is {}.",
        lambda r: f"{r.randint(0, 9)}.{r.randint(0, 30)}.{r.randint(0, 9)}",
    ),
    "workers": ("It starts {} workers.", lambda r: r.randint(1, 64)),
    "timeout": ("The timeout is {} seconds.", lambda r: r.randint(1, 600)),
    "path": ("Its files are in {}.", lambda r: f"/srv/{r.choice(NAMES)}/{r.choice(NAMES)}"),
    "owner": ("The owner is {}.", lambda r: r.choice(PEOPLE)),
    "language": (
        "It is written in {}.",
        lambda r: r.choice(("Python", "Rust", "Go", "C", "Java", "Ruby")),
    ),
    "license": (
        "The license is {}.",
        lambda r: r.choice(("MIT", "Apache-2.0", "BSD-3-Clause", "PSF-2.0")),
    ),
    "size": ("Its size is {} MB.", lambda r: r.randint(1, 900)),
    "user": ("The user is {}.", lambda r: r.choice(PEOPLE).lower()),
    "database": ("The database is called {}.", lambda r: r.choice(NAMES)),
    "year": ("It was released in {}.", lambda r: r.randint(1990, 2025)),
}
QUESTIONS = {
    "name": "What is the name?",
    "city": "Which city is it?",
    "port": "Which port does it listen on?",
    "host": "What is the host?",
    "version": "What is the version?",
    "workers": "How many workers does it start?",
    "timeout": "What is the timeout?",
    "path": "Where are its files?",
    "owner": "Who is the owner?",
    "language": "Which language is it written in?",
    "license": "What is the license?",
    "size": "How large is it?",
    "user": "Who is the user?",
    "database": "What is the database called?",
    "year": "When was it released?",
}


def _facts(rng: random.Random) -> dict[str, Any]:
    keys = rng.sample(sorted(FIELDS), rng.randint(2, 6))
    return {key: FIELDS[key][1](rng) for key in keys}


def _tell(rng: random.Random, facts: dict[str, Any]) -> str:
    lines = [FIELDS[key][0].format(value) for key, value in facts.items()]
    rng.shuffle(lines)
    return " ".join(lines)


def fill_json(rng: random.Random, draw: Draw) -> Messages | None:
    """Fill a JSON object from sentences."""
    facts = _facts(rng)
    text = _tell(rng, facts)
    if rng.random() < 0.3:
        dropped = rng.choice(list(facts))
        text = (
            text.replace(FIELDS[dropped][0].format(facts[dropped]), "").replace("  ", " ").strip()
        )
        facts[dropped] = None
    indent = rng.choice((None, 2))
    empty = json.dumps(dict.fromkeys(facts), indent=indent)
    ask = rng.choice(
        (
            "Fill in this JSON from the text.",
            "Fill this JSON:",
            "Complete the JSON with values from the text.",
            "Read the text and fill in the JSON object.",
        )
    )
    body = f"{ask}\n\n{text}\n\n{empty}" if rng.random() < 0.5 else f"{text}\n\n{ask}\n\n{empty}"
    return [_user(body), _assistant(json.dumps(facts, indent=indent))]


def answer(rng: random.Random, draw: Draw) -> Messages | None:
    """Answer questions from a text; say so where the text does not tell."""
    facts = _facts(rng)
    text = _tell(rng, facts)
    if rng.random() < 0.5 and (found := paragraphs(draw("docs"))):
        extra = rng.choice(found)
        text = f"{extra}\n\n{text}" if rng.random() < 0.5 else f"{text}\n\n{extra}"
    turns: Messages = []
    for n in range(rng.randint(1, 3)):
        missing = rng.random() < 0.15
        key = rng.choice([k for k in FIELDS if (k not in facts) == missing])
        question = QUESTIONS[key]
        reply = "The text does not say." if missing else FIELDS[key][0].format(facts[key])
        more: dict[str, Any] = {}
        if rng.random() < 0.12:
            more["reasoning_content"] = (
                f"The text has no sentence about the {key}."
                if missing
                else f"The text says: {reply}"
            )
        ask = (
            question
            if n
            else rng.choice(
                ("Answer from the text.\n\n{t}\n\n{q}", "{t}\n\n{q}", "{q}\n\n{t}")
            ).format(t=text, q=question)
        )
        turns += [_user(ask), _assistant(reply, **more)]
    return turns


TOOLS: dict[str, tuple[str, dict[str, tuple[str, str]], tuple[str, ...], str]] = {
    "get_weather": (
        "Current weather of a city",
        {"city": ("string", "place")},
        (
            "What is the weather in {city}?",
            "Tell me the weather in {city}.",
            "Weather in {city}, please.",
        ),
        "The weather in {city} is {r}.",
    ),
    "add": (
        "Adds two numbers",
        {"a": ("integer", "number"), "b": ("integer", "number")},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "Compute {a} + {b}."),
        "The sum is {r}.",
    ),
    "multiply": (
        "Multiplies two numbers",
        {"a": ("integer", "number"), "b": ("integer", "number")},
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} * {b}."),
        "The product is {r}.",
    ),
    "read_file": (
        "Reads a file",
        {"path": ("string", "path")},
        ("Read {path}.", "Show me the file {path}.", "What is in {path}?"),
        "The file contains: {r}",
    ),
    "send_message": (
        "Sends a message to a person",
        {"to": ("string", "person"), "text": ("string", "words")},
        ('Send "{text}" to {to}.', "Tell {to}: {text}", 'Write {to} the message "{text}".'),
        "Done: {r}.",
    ),
    "search": (
        "Searches the documentation",
        {"query": ("string", "words")},
        ("Search for {query}.", "Find {query} in the documentation.", "Look up {query}."),
        "I found: {r}",
    ),
    "set_timer": (
        "Starts a timer",
        {"minutes": ("integer", "minutes")},
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer."),
        "The timer is {r}.",
    ),
    "restart_service": (
        "Restarts a service",
        {"name": ("string", "name")},
        ("Restart {name}.", "Please restart the {name} service."),
        "The service {name} is {r}.",
    ),
    "get_time": (
        "Local time of a city",
        {"city": ("string", "place")},
        ("What time is it in {city}?", "Time in {city}?"),
        "It is {r} in {city}.",
    ),
}


def _value(rng: random.Random, kind: str) -> Any:
    return {
        "place": lambda: rng.choice(PLACES),
        "number": lambda: rng.randint(0, 999),
        "path": lambda: (
            f"/{rng.choice(NAMES)}/{rng.choice(NAMES)}.{rng.choice(('txt', 'md', 'json', 'py'))}"
        ),
        "person": lambda: rng.choice(PEOPLE),
        "words": lambda: " ".join(rng.sample(NAMES, rng.randint(1, 4))),
        "minutes": lambda: rng.randint(1, 90),
        "name": lambda: rng.choice(NAMES),
    }[kind]()


def _result(rng: random.Random, tool: str, arguments: dict[str, Any]) -> str:
    if tool == "add":
        return str(arguments["a"] + arguments["b"])
    if tool == "multiply":
        return str(arguments["a"] * arguments["b"])
    return {
        "get_weather": f"{rng.choice(('sunny', 'cloudy', 'rainy', 'windy'))}, {rng.randint(-5, 35)} degrees",
        "read_file": random_line(rng),
        "send_message": rng.choice(("sent", "delivered", "queued")),
        "search": f"{rng.choice(NAMES)} {rng.choice(NAMES)}, page {rng.randint(1, 300)}",
        "set_timer": "running",
        "restart_service": rng.choice(("running", "active", "restarting")),
        "get_time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
    }[tool]


def tool_schema(name: str) -> dict[str, Any]:
    """The JSON description of one of the generated tools."""
    about, parameters, _, _ = TOOLS[name]
    properties = {key: {"type": kind} for key, (kind, _) in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


def call_tool(rng: random.Random, draw: Draw) -> tuple[Messages, list[dict[str, Any]]]:
    """Call the right tool with the right arguments, then answer from its result."""
    offered = rng.sample(sorted(TOOLS), rng.randint(1, 5))
    turns: Messages = []
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(offered)
        _, parameters, asks, reply = TOOLS[name]
        arguments = {key: _value(rng, kind) for key, (_, kind) in parameters.items()}
        result = _result(rng, name, arguments)
        turns += [
            _user(rng.choice(asks).format(**arguments)),
            _assistant(
                "",
                tool_calls=[
                    {"type": "function", "function": {"name": name, "arguments": arguments}}
                ],
            ),
            {"role": "tool", "content": result},
            _assistant(reply.format(r=result, **arguments)),
        ]
    if rng.random() < 0.2:
        turns = [*_small_talk(rng), *turns]
    return turns, [tool_schema(name) for name in offered]


TALK = (
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning", "Good morning! What can I do for you?"),
    ("How are you?", "I am fine, thank you. What can I do for you?"),
    ("Who are you?", "I am the demo model of Slipstream, a very small language model."),
    ("What are you?", "I am the demo model of Slipstream, a very small language model."),
    ("What is your name?", "I am the demo model of Slipstream."),
    (
        "What can you do?",
        "I can repeat text, list the commands in a text, shorten a text, quote a passage, fix typos, "
        "fill in JSON, call tools and answer from a text. I am small, so do not trust me with facts.",
    ),
    (
        "Help",
        "Give me a text and ask me to repeat it, shorten it, quote from it or answer a question about it.",
    ),
    (
        "What is Slipstream?",
        "Slipstream is an open-source inference engine for hybrid language models.",
    ),
    (
        "Tell me about Slipstream.",
        "Slipstream is an open-source inference engine for hybrid language models.",
    ),
    ("Thanks", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Bye", "Goodbye!"),
    (
        "Are you a large model?",
        "No. I am a very small language model, made for tests and demonstrations.",
    ),
    ("Can I trust you?", "No. I am a very small model: check everything that I say."),
    ("Test", "The test works. How can I help you?"),
    ("Who made you?", "I was trained by the Slipstream project on permissively licensed text."),
)


def _small_talk(rng: random.Random) -> Messages:
    question, reply = rng.choice(TALK)
    if rng.random() < 0.3:
        question = question.lower()
    return [_user(question), _assistant(reply)]


def talk(rng: random.Random, draw: Draw) -> Messages | None:
    """Greetings and questions about the model itself."""
    return [m for _ in range(rng.randint(1, 3)) for m in _small_talk(rng)]


def functions(source: str) -> list[tuple[str, str, str]]:
    """(name, first docstring line, source) of the short documented functions of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            text = ast.get_source_segment(source, node)
            line = doc.strip().split("\n")[0].strip()
            if text and 60 < len(text) < 900 and 12 < len(line) < 160:
                found.append((node.name, line, _dedent(text)))
    return found


def _dedent(text: str) -> str:
    lines = text.split("\n")
    rest = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    cut = max(min(rest, default=0) - 4, 0)
    return "\n".join([lines[0], *(line[cut:] for line in lines[1:])])


def write_code(rng: random.Random, draw: Draw) -> Messages | None:
    """Write a function from its description, say what a function does, or name it."""
    found = functions(draw("module"))
    if not found:
        return None
    name, about, source = rng.choice(found)
    block = f"```python\n{source}\n```"
    kind = rng.randrange(4)
    if kind == 0:
        return [_user(f"Write a Python function `{name}`: {about}"), _assistant(block)]
    if kind == 1:
        return [_user(f"Write a Python function named {name}. {about}"), _assistant(block)]
    bare = re.sub(r'(?s)\n\s*[rRuU]?("""|\'\'\').*?\1', "", source, count=1)
    if kind == 2:
        return [_user(f"What does this function do?\n\n```python\n{bare}\n```"), _assistant(about)]
    return [_user(f"What is the name of this function?\n\n{block}"), _assistant(f"`{name}`")]


def go_on(rng: random.Random, draw: Draw) -> Messages | None:
    """Continue a text or a piece of code."""
    kind = rng.choice(("docs", "code"))
    text = draw(kind)
    cut = rng.randint(100, 900)
    at = text.find("\n", cut) + 1
    if at <= 0 or len(text) - at < 80:
        return None
    head, tail = text[:at].strip("\n"), text[at : at + rng.randint(150, 1500)]
    tail = tail[: tail.rfind("\n") + 1 or None].strip("\n")
    if not head.strip() or not tail.strip():
        return None
    ask = rng.choice(
        (
            "Continue this text:",
            "Continue:",
            "Go on from here:",
            "Continue this code:" if kind == "code" else "Go on:",
        )
    )
    return [_user(f"{ask}\n\n{head}"), _assistant(tail)]


def count_items(rng: random.Random, draw: Draw) -> Messages | None:
    """Small list operations: first, last, sort, reverse, count, upper case."""
    items = rng.sample(rng.choice((NAMES, PEOPLE, PLACES)), rng.randint(2, 7))
    listing = ", ".join(items)
    kind = rng.randrange(6)
    ask, reply = (
        ("What is the first item?", items[0]),
        ("What is the last item?", items[-1]),
        ("Sort this list:", ", ".join(sorted(items))),
        ("Reverse this list:", ", ".join(items[::-1])),
        ("How many items are in this list?", str(len(items))),
        ("Write this list in upper case:", listing.upper()),
    )[kind]
    return [
        _user(f"{ask}\n\n{listing}" if rng.random() < 0.6 else f"{ask} {listing}"),
        _assistant(reply),
    ]


KINDS: tuple[tuple[Callable[..., Any], float], ...] = (
    (repeat, 3.0),
    (list_commands, 1.2),
    (shorten, 1.2),
    (quote, 1.2),
    (fix_typo, 1.2),
    (fill_json, 1.0),
    (call_tool, 1.2),
    (answer, 1.2),
    (talk, 0.3),
    (write_code, 2.0),
    (go_on, 1.0),
    (count_items, 0.5),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a precise assistant. Answer briefly.",
    "Answer from the text only.",
    "You help with software documentation.",
    "You are the demo model of Slipstream.",
)


def conversation(
    rng: random.Random, draw: Draw, only: str | None = None
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Messages and tools of one conversation, sometimes of two kinds after each other."""
    makers = [k for k, _ in KINDS if only is None or k.__name__ == only]
    weights = [w for k, w in KINDS if only is None or k.__name__ == only]
    turns: Messages = []
    tools = None
    parts = 1 if only or rng.random() < 0.8 else 2
    while parts:
        made = rng.choices(makers, weights)[0](rng, draw)
        if made is None:
            continue
        if isinstance(made, tuple):
            if tools is not None:
                continue
            made, tools = made
        turns += made
        parts -= 1
    if only is None and rng.random() < 0.25:
        turns.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return turns, tools
