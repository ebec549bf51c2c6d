"""Options and manners that all commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from tidegate.errors import TidegateError

Address = Annotated[
    str, typer.Option("--address", envvar="RAY_ADDRESS", help="The Ray cluster, host:port; `auto` finds one here.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for a script.")]

P = ParamSpec("P")
T = TypeVar("T")


def says_errors(command: Callable[P, T]) -> Callable[P, T]:
    """An error of ours is a sentence on stderr and exit code 1, not a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except TidegateError as error:
            Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"error: {error}")
            raise typer.Exit(1) from None

    return run


def print_json(found: Any) -> None:
    """One object on stdout, for a script."""
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")
