"""A wrong input on a rank other than the first: kept quiet as long as the first rank, or the launcher, may say it."""

import os
import socket
import sys
import time
from pathlib import Path

from lightning_llm.run.launch.environment import rank_environment

AGENT, HANDED_ON = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
"""What torch's agent, torchrun's or ours, sets for the ranks that it starts."""
SECONDS = 20.0
"""In which the first rank has found, on the busiest machine, what all ranks find, and said it."""


def say_unless_said(text: str) -> None:
    """Print `text`, of this rank, once the first rank has had its time to print the same.

    torch's agent ends all ranks with the first that fails: one that ended at once would keep the first rank, which may
    be slower, from saying why. What it finds alone (a file that its machine lacks) it says itself. Ranks wait one after
    the other, so one of a machine speaks. Of ranks that srun has started, which ends no other, the first of a machine.
    """
    rank = rank_environment()
    if rank is None or _is_handed_on():
        return
    if AGENT not in os.environ and rank.local_rank > 0:
        return
    time.sleep(SECONDS + rank.local_rank)
    print(f"error: rank {rank.rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _is_handed_on() -> bool:
    """Return whether what was raised is written down for the launcher, which says it."""
    file = os.environ.get(HANDED_ON)
    return bool(file) and Path(str(file)).is_file() and Path(str(file)).stat().st_size > 0
