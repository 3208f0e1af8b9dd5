"""Rendezvous of the ranks of one machine, with a store that listens only on the loopback interface.

The store of torch's own rendezvous (`c10d`) listens on every interface of the machine.
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
"""Environment that puts gloo's sockets on the same interface (documentation of torch.distributed)."""


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a single agent, on any free port."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._closed = False
        self._store: Any = None

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use this store and create none of their own."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in the agent's log."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this agent's place in the rendezvous, which is rank 0 of 1."""
        if self._store is None:
            listener = socket.create_server((ADDRESS, 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(ADDRESS, port, is_master=True, master_listen_fd=listener.detach())
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return whether the agent has closed the rendezvous."""
        return self._closed

    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0, since no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the group of ranks that this agent starts."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous at the end; return True, as the agent expects."""
        self._closed = True
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register() -> str:
    """Register this rendezvous with torch's agent; return its name. May be called again."""
    rendezvous_handler_registry.register(NAME, _create)
    return NAME
