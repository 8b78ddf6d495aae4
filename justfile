# Tasks; each line is one that a person could type. `just` lists them.

python := env("PYTHON", "python")

default:
    @just --list

# format, lint, types, import order, docs: under a minute
check:
    {{python}} -m ruff format --check .
    {{python}} -m ruff check .
    {{python}} -m mypy
    {{python}} -m pytest -q tests/test_layout.py tests/test_docs.py

# rewrite what can be rewritten: format, lint fixes, reference pages
fix:
    {{python}} -m ruff format .
    {{python}} -m ruff check --fix .
    {{python}} -m tools.docgen

# CPU tests
test *args:
    {{python}} -m pytest -q -n 2 {{args}}

# tests on real checkpoints; takes minutes, fetches them once
e2e *args:
    {{python}} -m pytest -q -m e2e {{args}}

# what CI runs
ci:
    bash .ci/run

# answer one prompt
run prompt *args:
    {{python}} -m slipstream run "{{prompt}}" {{args}}

# the memory plan of a checkpoint
plan *args:
    {{python}} -m slipstream plan {{args}}
