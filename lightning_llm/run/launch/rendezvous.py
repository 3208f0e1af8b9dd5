"""Where the ranks of one machine meet: a store that listens on the loopback interface alone.

torch's own rendezvous (`c10d`) has its store listen on every interface of the machine, for whoever comes by.
"""

import socket
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "lightning-llm-loopback"
ADDRESS = "127.0.0.1"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""What has gloo's sockets between ranks on that interface, too (torch's documentation of torch.distributed)."""


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of the one agent that there is, on any free port."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._closed = False
        self._store: Any = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks take this store, and make none of their own."""
        return True

    def get_backend(self) -> str:
        """Return what the agent's log calls this."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and that this is the first of one machine."""
        if self._store is None:
            listener = socket.create_server((ADDRESS, 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(ADDRESS, port, is_master=True, master_listen_fd=listener.detach())
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return whether the agent has ended it."""
        return self._closed

    def set_closed(self) -> None:
        """End it."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else comes."""
        return 0

    def get_run_id(self) -> str:
        """Return what tells this start from others."""
        return self._run_id

    def shutdown(self) -> bool:
        """End it, as the agent does last."""
        self._closed = True
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register() -> str:
    """Let torch's agent know of this rendezvous; return its name. A second call does nothing."""
    rendezvous_handler_registry.register(NAME, _create)
    return NAME
