"""The command `lightning-llm`. Sets up signals and streams before any slow import."""

import sys

from lightning_llm.base.process import (
    has_working_folder,
    leave_working_folder,
    slow_imports,
    take_process,
    unset_empty_ranks,
    use_utf8,
)
from lightning_llm.base.signals import early_signals, signal_of, stop_line
from lightning_llm.base.terminal import open_standard_streams


def main(argv: list[str] | None = None) -> int:
    """Run the verb named by the arguments `argv`; return the exit code. None: use this process's own arguments."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if argv is not None:
            return _run(arguments)
        with early_signals(arguments):
            use_utf8()
            open_standard_streams()
            if not has_working_folder():
                print("error: the working directory was deleted. Change to an existing one.", file=sys.stderr)
                return 2
            leave_working_folder()
            unset_empty_ranks()
            return _run_command(arguments)
    except BaseException as error:
        # A signal during an import may surface as another exception, raised by a C extension.
        if not (number := signal_of(error)):
            raise
        print(stop_line(number, arguments), end="", file=sys.stderr)
        return 128 + number


def _run_command(arguments: list[str]) -> int:
    take_process()
    with slow_imports():
        from lightning_llm.config.redact import print_redacted

    sys.excepthook = print_redacted
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    with slow_imports():
        from lightning_llm.cli.command_line import run_verb

    return run_verb(arguments)


if __name__ == "__main__":
    sys.exit(main())
