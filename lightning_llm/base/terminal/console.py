"""Rich consoles that write to the standard output or error, in a notebook as on a terminal."""

from typing import Any

from rich.console import Console


def new_console(**options: Any) -> Console:
    """Return a console of rich with these options, which writes to `sys.stdout` as it is at that moment.

    In a notebook, rich's own default bypasses `sys.stdout`: it ignores `redirect_stdout`, and so `quiet=True`.
    """
    return Console(force_jupyter=False, **options)
