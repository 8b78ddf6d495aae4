"""Downloads the packages of `sources` with apt-get and pip and turns them into plain documents.

The result is ``documents.jsonl.xz``: one JSON object a line with ``source``, ``path``, ``kind``
(``docs`` or ``code``) and ``text``. HTML becomes Markdown: headings, paragraphs, lists, fenced code.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from tools.train_demo.sources import SOURCES, Source

_MIRROR = "http://deb.debian.org/debian"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SUITE = "bookworm"


class _Markdown(HTMLParser):
    """HTML to Markdown, for documentation pages: keeps headings, paragraphs, lists and code."""

    _SKIP = frozenset(
        {"script", "style", "nav", "footer", "head", "form", "button", "svg", "noscript"}
    )
    _BLOCK = frozenset(
        {"p", "div", "section", "table", "tr", "dl", "dd", "dt", "ul", "ol", "blockquote"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.skip = 0
        self.pre = 0
        self.code = 0
        self.stack: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"br", "hr", "img", "meta", "link", "input", "wbr", "col"}:
            if tag == "br" and not self.skip:
                self.out.append("\n")
            return
        names = " ".join(v or "" for k, v in attrs if k in {"class", "role", "id"})
        hide = tag in self._SKIP or bool(
            re.search(
                r"headerlink|sidebar|navigation|related|navheader|navfooter|menu|breadcrumb|footer",
                names,
            )
        )
        self.stack.append((tag, hide))
        self.skip += hide
        if self.skip:
            return
        if re.fullmatch("h[1-6]", tag):
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag == "pre":
            self.pre += 1
            self.out.append("\n\n```\n")
        elif tag in {"code", "tt"} and not self.pre:
            self.code += 1
            self.out.append("`" if self.code == 1 else "")
        elif tag == "li":
            self.out.append("\n- ")
        elif tag in self._BLOCK:
            self.out.append("\n\n")
        elif tag in {"td", "th"}:
            self.out.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if not any(name == tag for name, _ in self.stack):
            return
        while self.stack:
            name, hide = self.stack.pop()
            if not self.skip:
                if name == "pre":
                    self.pre -= 1
                    self.out.append("\n```\n\n")
                elif name in {"code", "tt"} and not self.pre and self.code:
                    self.code -= 1
                    self.out.append("`" if self.code == 0 else "")
                elif name in self._BLOCK or re.fullmatch("h[1-6]", name):
                    self.out.append("\n\n")
            self.skip -= hide
            if name == tag:
                break

    def handle_data(self, data: str) -> None:
        if self.skip:
            return
        self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_to_markdown(page: str) -> str:
    """Text of one HTML page as Markdown."""
    parser = _Markdown()
    body = re.search(
        r"<(main|article)\b|<div[^>]*(role=\"main\"|id=\"(content|page-content)\")", page
    )
    parser.feed(page[body.start() :] if body else page)
    text = "".join(parser.out).replace("¶", "").replace("\xa0", " ")
    pieces = re.split(r"(\n```\n.*?\n```\n)", text, flags=re.S)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", pieces[i]))
        pieces[i] = re.sub(r"\n- *\n+", "\n- ", pieces[i])
    text = re.sub(r"\n```\n+", "\n```\n", re.sub(r"[ \t]+\n", "\n", "".join(pieces)))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _apt_options(root: Path) -> list[str]:
    """apt-get options for a private list of sources, so that the machine's own stays as it is."""
    for folder in ("lists/partial", "archives/partial"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    listing = root / "sources.list"
    listing.write_text(
        f"deb [signed-by={_KEYRING}] {_MIRROR} {_SUITE} main\n"
        f"deb-src [signed-by={_KEYRING}] {_MIRROR} {_SUITE} main\n"
    )
    return [
        "-qq",
        f"-oDir::Etc::SourceList={listing}",
        "-oDir::Etc::SourceParts=/dev/null",
        f"-oDir::State::Lists={root / 'lists'}",
        f"-oDir::Cache::archives={root / 'archives'}",
        "-oAPT::Sandbox::User=root",
    ]


def _download_one(source: Source, folder: Path, options: list[str]) -> bool:
    """Brings one package into ``folder``; False where the mirror lacks it."""
    if (folder / ".done").exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    if source.form in {"sdist", "wheel"}:
        kind = "--no-binary" if source.form == "sdist" else "--only-binary"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            kind,
            ":all:",
            source.package,
        ]
    else:
        verb = ["download"] if source.form == "deb" else ["source", "--download-only"]
        command = ["apt-get", *options, *verb, source.package]
    done = subprocess.run(command, cwd=folder, check=False, stderr=subprocess.DEVNULL)
    if done.returncode:
        return False
    for deb in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb.name, "tree"], cwd=folder, check=True)
    (folder / ".done").touch()
    return True


def download(work: Path) -> list[str]:
    """Brings the packages of `SOURCES` into ``work/raw/<package>/``; names those not to be had."""
    options = _apt_options(work / "apt")
    subprocess.run(["apt-get", *options, "update"], check=True)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda s: _download_one(s, work / "raw" / s.package, options), SOURCES)
    return [s.package for s, ok in zip(SOURCES, found, strict=True) if not ok]


_SKIP_PATH = re.compile(
    r"/(locale|locales|node_modules|vendor|_vendor|third_party|extern|externals|migrations|fixtures|"
    r"snapshots|debian|licenses?|\.github|releasenotes|whatsnew|changelog)/|"
    r"(genindex|py-modindex|search|changelog|CHANGES|HISTORY|NEWS|AUTHORS|LICENSE|COPYING|"
    r"CONTRIBUTORS|release[-_]?notes|bookindex|contributors|print)\b",
    re.I,
)


def _files(source: Source, folder: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every candidate file of a package."""
    if source.form == "deb":
        tree = folder / "tree"
        for path in sorted(tree.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1_500_000:
                yield str(path.relative_to(tree)), path.read_bytes()
        return
    for archive in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    yield name, wheel.read(name)
    for archive in sorted(folder.glob("*.tar.*")):
        if archive.suffix == ".asc" or (source.form == "src" and ".orig" not in archive.name):
            continue
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.size < 1_500_000:
                    handle = tar.extractfile(member)
                    if handle is not None:
                        yield member.name, handle.read()


def _clean(path: str, kind: str, text: str) -> str | None:
    """The document's text, or None where it is not worth training on."""
    text = text.replace("\r\n", "\n").replace("\t", "    ").strip()
    if kind == "code":
        text = re.sub(r"\A(#!.*\n)?((#.*)?\n)*", "", text)
    if not 400 <= len(text) <= 200_000:
        return None
    lines = text.split("\n")
    if max(map(len, lines)) > 2000 or sum(map(len, lines)) / len(lines) > 400:
        return None
    ascii_letters = sum(ch.isascii() and (ch.isalpha() or ch in " \n_") for ch in text)
    if ascii_letters < 0.62 * len(text) or sum(not ch.isascii() for ch in text) > 0.02 * len(text):
        return None
    if kind == "docs" and len(set(lines)) < 0.4 * len(lines):
        return None
    return text


# A file that names one of these may hold text under other terms than its package.
_OTHER_TERMS = re.compile(
    r"creative\s*commons|\bcc[- ]by\b|share\s*-?alike|general\s+public\s+licen[sc]e|\b[al]?gpl(v[23])?\b"
    r"|mozilla\s+public|non-?commercial|free\s+documentation\s+licen|stack\s?overflow\.com/(a|questions)\b",
    re.I,
)


def _kind(source: Source, path: str) -> str | None:
    """``docs``, ``code`` or None for a path."""
    slashed = "/" + path
    if _SKIP_PATH.search(slashed) or (source.only and not any(o in slashed for o in source.only)):
        return None
    name = path.rsplit("/", 1)[-1].lower()
    if source.code and name.endswith((".py", ".pyx")) and name != "__init__.py":
        return "code"
    if not source.docs:
        return None
    if name.endswith((".html", ".html.en", ".html.gz")) and source.form == "deb":
        return "docs"
    if name.endswith((".rst", ".md", ".markdown", ".rst.txt")):
        return "docs"
    return "docs" if name.endswith(".txt") and "/docs/" in slashed else None


def _candidates(source: Source, folder: Path) -> list[tuple[str, str, str]]:
    """(kind, path, text) of every cleaned document of a package."""
    found: list[tuple[str, str, str]] = []
    for path, raw in _files(source, folder):
        kind = _kind(source, path)
        if kind is None:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if _OTHER_TERMS.search(text):
            continue
        if ".html" in path.rsplit("/", 1)[-1]:
            text = html_to_markdown(text)
        cleaned = _clean(path, kind, text)
        if cleaned is not None:
            found.append((kind, path, cleaned))
    # A fixed pseudo-random order, so that a cap takes a fair sample of the package.
    found.sort(key=lambda item: hashlib.sha1(item[1].encode()).digest())
    return found


def documents(work: Path) -> Iterator[dict[str, str]]:
    """Cleaned documents of all sources, without exact duplicates, each source cut to its cap."""
    seen: set[bytes] = set()
    folders = [work / "raw" / source.package for source in SOURCES]
    with ProcessPoolExecutor() as pool:
        for source, found in zip(SOURCES, pool.map(_candidates, SOURCES, folders), strict=True):
            taken = {"docs": 0, "code": 0}
            for kind, path, text in found:
                digest = hashlib.sha1(re.sub(r"\s+", "", text).encode()).digest()
                cap = source.docs if kind == "docs" else source.code
                if digest in seen or taken[kind] + len(text) > cap:
                    continue
                seen.add(digest)
                taken[kind] += len(text)
                yield {"source": source.package, "path": path, "kind": kind, "text": text}


def _version(source: Source, folder: Path) -> str:
    """Version of a downloaded package, from its file's name, without Debian's revision."""
    for path in sorted(folder.iterdir()):
        name = re.sub(r"\.(tar\.\w+|whl|deb|zip)$", "", path.name)
        if name == path.name or ".debian" in name:
            continue
        found = re.search(r"[-_]([\d%][^-_]*)", name)
        if found:
            return re.sub(r"\.orig.*$", "", unquote(found[1]).split(":")[-1])
    return ""


def fetch(work: Path) -> None:
    """Writes ``documents.jsonl.xz`` and ``sources.csv`` (version, licence and bytes of each package)."""
    missing = download(work)
    if missing:
        print("not on the mirror, left out:", ", ".join(missing))
    sizes = {source.package: {"docs": 0, "code": 0} for source in SOURCES}
    temporary = work / "documents.tmp"
    with lzma.open(temporary, "wt", preset=1, encoding="utf-8") as out:
        for doc in documents(work):
            out.write(json.dumps(doc, ensure_ascii=False) + "\n")
            sizes[doc["source"]][doc["kind"]] += len(doc["text"].encode())
    rows = [
        f"{s.package},{_version(s, work / 'raw' / s.package)},{s.licence},{n['docs']},{n['code']}"
        for s in SOURCES
        if sum((n := sizes[s.package]).values())
    ]
    (work / "sources.csv").write_text(
        "\n".join(["package,version,licence,docs_bytes,code_bytes", *rows]) + "\n"
    )
    os.replace(temporary, work / "documents.jsonl.xz")


def read_documents(work: Path) -> Iterator[dict[str, str]]:
    """Documents written by `fetch`, in order."""
    with lzma.open(work / "documents.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
