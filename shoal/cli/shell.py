"""The command without a command, and how whatever goes wrong becomes one line and an exit code."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shoal import __version__, errors

app = typer.Typer(
    help="Train one PyTorch model on many workers that come and go.",
    epilog="""**Examples**

`shoal doctor` — is this machine fit to train?

`shoal run -n 4 train.py`, then in another terminal `shoal top`

`shoal COMMAND --help` has examples of each; `shoal --install-completion` teaches your shell to complete them""",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


# typer brings its own copy of click in newer versions, and exports this one of its errors only
_BadCommandLine: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def one_line(error: BaseException) -> str:
    first, start, rest = str(error).partition("\ndef ")  # an example of what is missing stays as it is
    text = " ".join(first.split()) + start + rest
    return text if type(error) is errors.ShoalError else f"{type(error).__name__}: {text}"


def _told(error: Any, words: Sequence[str]) -> str:
    """What is wrong with the words of a command line, and where to read on."""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "shoal"
    text = " ".join(error.format_message().split()).rstrip(".")
    below_0 = [word for word in words if re.fullmatch(r"-\d+(\.\d+)?", word)]
    if type(error).__name__ == "NoSuchOption" and below_0:
        text = f"{below_0[0]} is taken for an option, which {command} does not have; write a number from 1 up"
    return f"{text}; see {command} --help"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except errors.ShoalError as error:
        if error.__cause__ is not None and type(error) is errors.ShoalError:  # ours to put right, so show where
            traceback.print_exception(error.__cause__)
        print(f"shoal: {one_line(error)}", file=sys.stderr)
        code = errors.exit_code(error)
    except _BadCommandLine as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            told = _told(error, sys.argv[1:] if arguments is None else arguments)
            print(f"shoal: SettingsContradict: {told}", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)
