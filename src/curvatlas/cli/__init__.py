"""The ``curvatlas`` command: parses arguments, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the computation failed, 2 wrong use or unreadable input, 3 stopped by the time
budget, 4 some steps failed and the page has the others, 130 interrupted; after 3 and 130 the same
command goes on, after 4 it tries the failed steps again.
Nothing heavy is imported before a command runs: ``curvatlas --help`` does not load PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from curvatlas.budget import ran_out, readable
from curvatlas.cli import execution
from curvatlas.cli.checks import bench, check, compare, doctor, report, verify
from curvatlas.cli.compression import prune, quantize
from curvatlas.cli.execution import Interrupted
from curvatlas.cli.experiments import scaling, train
from curvatlas.cli.flatness import flatness, generalisation
from curvatlas.cli.options import with_groups
from curvatlas.cli.papers import gauss_newton, growth, paper, sinks
from curvatlas.cli.planning import plan
from curvatlas.cli.surveys import analyze, atlas, demo, landscape
from curvatlas.errors import OutOfMemory, PeerError, UserCodeError, is_wrong_input

# in the order a newcomer meets them
COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "analyze": analyze,
    "plan": plan,
    "atlas": atlas,
    "landscape": landscape,
    "growth": growth,
    "sinks": sinks,
    "gauss-newton": gauss_newton,
    "flatness": flatness,
    "generalisation": generalisation,
    "scaling": scaling,
    "train": train,
    "prune": prune,
    "quantize": quantize,
    "paper": paper,
    "verify": verify,
    "report": report,
    "compare": compare,
    "check": check,
    "bench": bench,
    "doctor": doctor,
}


# typer ≥ 0.26 carries its own click: its exceptions are found from the one it exports
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_INTERRUPTED = 130

app = typer.Typer(
    name="curvatlas",
    help="The whole second-order picture of a Transformer: exact where exact is possible, "
    "with an error bar where it is not.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _function in COMMANDS.items():
    # the whole first line of the docstring: typer would cut it short in the list of commands
    _summary = (_function.__doc__ or "").strip().split("\n")[0]
    app.command(name=_name, short_help=_summary)(with_groups(_function))


def _show_version(asked: bool) -> None:
    if asked:
        from curvatlas import __version__

        print(f"curvatlas {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code."""
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _terminate)
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    execution.leave_group()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    debug, as_json = "--debug" in arguments, "--json" in arguments
    command = typer.main.get_command(app)
    usual = warnings.formatwarning
    warnings.formatwarning = _one_line
    try:
        execution.check_processes(arguments)
        code = command.main(args=arguments, prog_name="curvatlas", standalone_mode=False)
    except Interrupted as interruption:
        return _complain(str(interruption), _INTERRUPTED, interruption, as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        return 0
    except _UsageError as error:
        return _wrong_use(error, as_json)
    except Exception as error:
        if debug:
            raise
        return _failure(error, as_json)
    finally:
        warnings.formatwarning = usual
    if code == _INTERRUPTED:  # before there was a run to resume
        _complain("interrupted", code, KeyboardInterrupt(), as_json)
    return code if isinstance(code, int) else 0


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning for the user, without the line of ours that gave it."""
    return f"curvatlas: {' '.join(str(message).split())}\n"


def _wrong_use(error: Any, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "curvatlas"
    return _complain(f"{error.format_message()} See '{where} --help'.", 2, error, as_json)


def _failure(error: Exception, as_json: bool) -> int:
    """One line, and 2 when what the user gave is at fault, 1 when the computation is."""
    message = " ".join(str(error).split()) or type(error).__name__
    ours = is_wrong_input(error)
    if isinstance(error, KeyError):
        message = str(error.args[0]) if error.args else message
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif isinstance(error, OutOfMemory):
        message = f"{message} What was computed is kept."
    elif ran_out(error):
        asked = re.search(r"allocate (\d+) bytes", message)
        size = f" (asked for {readable(int(asked[1]))} at once)" if asked else ""
        message = (
            f"out of memory{size}: start again with a smaller --memory, fewer --samples or a "
            "smaller --batch-size; what was computed is kept."
        )
    elif not ours and not isinstance(error, (PeerError, UserCodeError)):
        message = f"{type(error).__name__}: {message} (--debug shows where)"
    full = isinstance(error, OSError) and error.errno in (28, 122)
    return _complain(message, 2 if ours and not full else 1, error, as_json)


def _complain(message: str, code: int, error: BaseException, as_json: bool) -> int:
    """One line on stderr, and with ``--json`` an object on stdout; gives the exit code."""
    print(f"curvatlas: {message}", file=sys.stderr)
    if as_json:
        told = {"message": message, "type": type(error).__name__, "exit_code": code}
        print(json.dumps({"error": told}), flush=True)
    return code


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # ends as Ctrl-C does: the run is kept and can be resumed
