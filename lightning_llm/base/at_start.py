"""First import of the command: Ctrl-C ends the process without a traceback, until `early_signals` handles signals.

Has no effect when another program imports the package. Imports only Python's standard modules.
"""

import signal
import sys


def is_command() -> bool:
    """Return whether this process is `lightning-llm` or `python -m lightning_llm`."""
    if sys.argv[0] == "-m":  # Python looks for the module
        words = sys.orig_argv
        return words[words.index("-m") + 1 :][:1] == ["lightning_llm"] if "-m" in words else False
    return sys.argv[0].rpartition("/")[2] == "lightning-llm"


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
