"""The `slipstream` command: runs one command of `slipstream.cli` and turns errors into one line."""

from __future__ import annotations

import contextlib
import os
import sys

USAGE = 2  # exit codes
FAILURE = 1
INTERRUPTED = 130
# Errors that say the command was wrong, by name: their modules are loaded by commands only.
WRONG_USAGE = ("ConfigError", "RequestError", "TooLong", "NoSuchModel")


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit the process.

    Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.

    Args:
        args: arguments after the program's name; None: the process's own.
    """
    args = sys.argv[1:] if args is None else args
    # A closed stream is None to Python; what is written there is meant to be lost.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    debug = "--debug" in args
    # Threads that wait for each other by spinning stop all progress when another program wants
    # the cores, and threads that sleep at once are late every time: spin shortly, then sleep.
    # GNU OpenMP reads this when torch is loaded, which is later.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        from typer.main import get_command

        from slipstream.cli import build

        get_command(build()).main(args, prog_name="slipstream")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _close_output()
        sys.exit(FAILURE)
    except Exception as error:
        if debug:
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        sys.exit(USAGE if type(error).__name__ in WRONG_USAGE else FAILURE)


def _sentence(error: Exception) -> str:
    """What a person is told: our own errors carry their text, any other one names its kind."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and type(error).__module__.startswith("slipstream."):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def _close_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
