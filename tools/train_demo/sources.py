"""The text of the demo model: which packages, under which licence, and how much of each.

Every source is a Debian or PyPI package under a permissive licence. The licence column is
what the package's own metadata says for the files taken here. Some projects license their
documentation otherwise than their code. Left out for that: Celery, Pyramid and the Rails guides
(share-alike), NLTK and the Embedded Rust Book, the documentation of IPython and of the OpenStack
projects (Creative Commons Attribution, or rendered under it). `fetch` also drops every file that
names a Creative Commons or copyleft licence or an answer on Stack Overflow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package.

    ``form`` is ``deb`` or ``src`` (Debian's binary package or upstream tarball), ``sdist`` or ``wheel``
    (PyPI).
    ``docs`` and ``code`` are caps in bytes of extracted text; 0 takes none.
    ``only`` keeps paths with one of these fragments (empty keeps all).
    """

    package: str
    licence: str
    form: str = "sdist"
    docs: int = 0
    code: int = 0
    only: tuple[str, ...] = ()


MB = 1_000_000

SOURCES: tuple[Source, ...] = (
    # Documentation built as HTML.
    Source("python3.11-doc", "PSF-2.0", "deb", docs=12 * MB),
    Source(
        "rust-doc",
        "MIT OR Apache-2.0",
        "deb",
        docs=9 * MB,
        only=(
            "/book/",
            "/reference/",
            "/rust-by-example/",
            "/cargo/",
            "/nomicon/",
            "/rustc/",
            "/edition-guide/",
            "/rustdoc/",
            "/unstable-book/",
        ),
    ),
    Source("postgresql-doc-15", "PostgreSQL", "deb", docs=7 * MB),
    Source("sqlite3-doc", "public domain", "deb", docs=6 * MB),
    Source("apache2-doc", "Apache-2.0", "deb", docs=4 * MB, only=("/en/", ".html.en")),
    Source("nodejs-doc", "MIT", "deb", docs=4 * MB),
    Source("llvm-14-doc", "Apache-2.0 WITH LLVM-exception", "deb", docs=3 * MB),
    # The Python standard library and its tests.
    Source("libpython3.11-minimal", "PSF-2.0", "deb", code=4 * MB),
    Source("libpython3.11-stdlib", "PSF-2.0", "deb", code=10 * MB),
    Source("libpython3.11-testsuite", "PSF-2.0", "deb", code=4 * MB),
    # Documentation built as HTML, upstream tarballs, and Python packages with their documentation.
    Source("python-sqlalchemy-doc", "MIT", "deb", docs=4 * MB),
    Source("python-pandas-doc", "BSD-3-Clause", "deb", docs=6 * MB),
    Source("python-sklearn-doc", "BSD-3-Clause", "deb", docs=5 * MB),
    Source("python-scipy-doc", "BSD-3-Clause", "deb", docs=5 * MB),
    Source("python-statsmodels-doc", "BSD-3-Clause", "deb", docs=2 * MB),
    Source("etcd", "Apache-2.0", "src", docs=2 * MB),
    Source("prometheus", "Apache-2.0", "src", docs=2 * MB),
    Source("Django", "BSD-3-Clause", docs=8 * MB, code=7 * MB),
    Source("SQLAlchemy", "MIT", docs=2 * MB, code=5 * MB),
    Source("sympy", "BSD-3-Clause", "src", docs=1 * MB, code=6 * MB),
    Source("networkx", "BSD-3-Clause", docs=1 * MB, code=2 * MB),
    Source("Flask", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("Jinja2", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("Werkzeug", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("click", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("Twisted", "MIT", docs=2 * MB, code=5 * MB),
    Source("tornado", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("aiohttp", "Apache-2.0", docs=1 * MB, code=2 * MB),
    Source("kombu", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("starlette", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("uvicorn", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("httpx", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("pydantic", "MIT", docs=2 * MB, code=2 * MB),
    Source("djangorestframework", "BSD-3-Clause", docs=2 * MB, code=2 * MB),
    Source("marshmallow", "MIT", docs=1 * MB, code=1 * MB),
    Source("pytest", "MIT", docs=2 * MB, code=2 * MB),
    Source("black", "MIT", docs=1 * MB, code=1 * MB),
    Source(
        "pip",
        "MIT",
        docs=1 * MB,
        code=1 * MB,
        only=(
            "/docs/",
            "/src/pip/_internal/",
        ),
    ),
    Source(
        "setuptools",
        "MIT",
        docs=1 * MB,
        code=1 * MB,
        only=(
            "/docs/",
            "/setuptools/",
        ),
    ),
    Source("poetry", "MIT", docs=1 * MB, code=1 * MB),
    Source("Sphinx", "BSD-2-Clause", docs=2 * MB, code=2 * MB),
    Source("mkdocs", "BSD-2-Clause", docs=1 * MB, code=1 * MB),
    Source("Markdown", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("ipython", "BSD-3-Clause", code=2 * MB),
    Source("traitlets", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("nbconvert", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("requests", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("urllib3", "MIT", docs=1 * MB, code=1 * MB),
    Source("Scrapy", "BSD-3-Clause", docs=2 * MB, code=2 * MB),
    Source("dask", "BSD-3-Clause", docs=2 * MB, code=3 * MB),
    Source("xarray", "Apache-2.0", docs=2 * MB, code=3 * MB),
    Source("seaborn", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source(
        "cython",
        "Apache-2.0",
        docs=2 * MB,
        code=1 * MB,
        only=(
            "/docs/",
            "/Cython/",
        ),
    ),
    Source("trio", "MIT OR Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("alembic", "MIT", docs=1 * MB, code=1 * MB),
    Source("redis", "MIT", docs=1 * MB, code=2 * MB),
    Source("pymongo", "Apache-2.0", docs=1 * MB, code=2 * MB),
    Source("openpyxl", "MIT", docs=1 * MB, code=1 * MB),
    Source("pyparsing", "MIT", docs=1 * MB, code=1 * MB),
    Source("attrs", "MIT", docs=1 * MB, code=1 * MB),
    Source("rich", "MIT", "src", docs=1 * MB, code=1 * MB),
    Source("gunicorn", "MIT", docs=1 * MB, code=1 * MB),
    Source("boto3", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("botocore", "Apache-2.0", docs=1 * MB, code=2 * MB),
    Source("awscli", "Apache-2.0", docs=4 * MB, code=2 * MB),
    Source("Babel", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("coverage", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("hatch", "MIT", docs=1 * MB, code=1 * MB),
    Source("nox", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("pre-commit", "MIT", docs=1 * MB, code=1 * MB),
    Source("jsonschema", "MIT", docs=1 * MB, code=1 * MB),
    Source("keystone", "Apache-2.0", "src", code=2 * MB),
    Source("nova", "Apache-2.0", code=4 * MB),
    Source("cinder", "Apache-2.0", code=3 * MB),
    Source("neutron", "Apache-2.0", code=3 * MB),
    Source("glance", "Apache-2.0", code=2 * MB),
    Source("swift", "Apache-2.0", code=2 * MB),
    Source("ironic", "Apache-2.0", code=3 * MB),
    Source("oslo.messaging", "Apache-2.0", code=1 * MB),
    Source("sentry-sdk", "MIT", code=1 * MB),
    Source("wtforms", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("peewee", "MIT", docs=1 * MB, code=1 * MB),
    Source("tortoise-orm", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("kubernetes", "Apache-2.0", code=1 * MB),
    Source("docker", "Apache-2.0", docs=1 * MB, code=1 * MB),
    Source("fabric", "BSD-2-Clause", docs=1 * MB, code=1 * MB),
    Source("invoke", "BSD-2-Clause", docs=1 * MB, code=1 * MB),
    Source("typer", "MIT", docs=1 * MB, code=1 * MB),
    Source("litestar", "MIT", docs=2 * MB, code=2 * MB),
    Source("falcon", "Apache-2.0", docs=2 * MB, code=1 * MB),
    Source("sanic", "MIT", docs=1 * MB, code=1 * MB),
    Source("joblib", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("patsy", "BSD-2-Clause", docs=1 * MB, code=1 * MB),
    Source("pint", "BSD-3-Clause", docs=1 * MB, code=1 * MB),
    Source("bokeh", "BSD-3-Clause", docs=2 * MB, code=2 * MB),
    Source("numpy", "BSD-3-Clause", "wheel", code=5 * MB),
    Source("pandas", "BSD-3-Clause", "wheel", code=7 * MB),
    Source("scikit-learn", "BSD-3-Clause", "wheel", code=5 * MB),
    Source("scipy", "BSD-3-Clause", "wheel", code=5 * MB),
    Source("statsmodels", "BSD-3-Clause", "wheel", code=4 * MB),
    Source("transformers", "Apache-2.0", "wheel", code=8 * MB),
    Source("fastapi", "MIT", "wheel", code=1 * MB),
    Source("matplotlib", "PSF-based", "wheel", code=5 * MB),
    Source("numba", "BSD-2-Clause", "wheel", code=3 * MB),
    Source("datasets", "Apache-2.0", "wheel", code=2 * MB),
    Source("accelerate", "Apache-2.0", "wheel", code=1 * MB),
    Source("huggingface-hub", "Apache-2.0", "wheel", code=1 * MB),
    Source("diffusers", "Apache-2.0", "wheel", code=4 * MB),
    Source("peft", "Apache-2.0", "wheel", code=2 * MB),
)
