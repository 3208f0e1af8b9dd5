"""Ranks of one machine and their launchers listen on the loopback interface only. 10 seconds."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.process import SAFE_PATH
from lightning_llm.base.signals import signals_passed_on
from lightning_llm.run.launch.torch_agent import launch_ranks

ROOT = Path(__file__).parents[3]


class Listening(pl.Callback):
    """Notes in `folder` the addresses that this rank, its launcher and their children listen on after a step."""

    def __init__(self, folder: str):
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        here = psutil.Process()
        parent = here.parent()
        family = [here, *here.children(recursive=True), *([parent] if parent else [])]
        found = {f"{each.pid} {socket.laddr.ip}" for each in family for socket in listening(each)}
        Path(self.folder, f"rank{trainer.global_rank}").write_text("\n".join(sorted(found)))


def test_the_store_that_ranks_meet_by_is_on_the_loopback_interface_and_gloo_is_sent_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    seen: dict[str, Any] = {}
    safe_path = os.environ.get(SAFE_PATH)

    def launch(settings: Any, program: str) -> Any:
        parameters = RendezvousParameters(
            settings.rdzv_backend, "", settings.run_id, settings.min_nodes, settings.max_nodes
        )
        before = listening(psutil.Process())
        info = get_rendezvous_handler(parameters).next_rendezvous()
        seen.update(info=info, sockets=listening(psutil.Process()) - before, gloo=os.environ.get("GLOO_SOCKET_IFNAME"))
        seen["signals"] = settings.signals_to_handle
        return lambda *words: seen.update(words=words, safe_path=os.environ[SAFE_PATH])

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup: torch's agent would put its own handler there
    try:
        launch_ranks(2, ["train"], threads=1, shutdown_seconds=1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with signals_passed_on():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    with signals_passed_on() as relay:
        assert signal.getsignal(signal.SIGHUP) is relay
    assert seen["signals"] == "SIGTERM,SIGINT,SIGQUIT"
    assert {each.laddr.ip for each in seen["sockets"]} == {"127.0.0.1"}
    where = seen["info"].bootstrap_store_info
    assert {each.laddr.port for each in seen["sockets"]} == {where.master_port}
    assert (where.master_addr, seen["info"].world_size, seen["gloo"]) == ("127.0.0.1", 1, "lo")
    seen["info"].store.set("key", "value")
    assert seen["info"].store.get("key") == b"value"
    assert (seen["words"], seen["safe_path"]) == (("-P", "-m", "lightning_llm", "train"), "1")
    assert os.environ.get(SAFE_PATH) == safe_path


def listening(process: psutil.Process) -> set[Any]:
    return {each for each in process.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", "pp"])
def test_only_the_loopback_interface_is_listened_on(
    layout: str, small_run: Any, tmp_path: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    watch = f"+callbacks.listening={{_target_: tests.run.launch.test_sockets.Listening, folder: {tmp_path}}}"
    metrics = "+callbacks.prometheus={_target_: lightning_llm.callbacks.prometheus.Prometheus, port: 0}"
    words = [
        f"parallel={layout}",
        "trainer.devices=2",
        "data.micro_batch_size=1",
        "trainer.max_steps=2",
        watch,
        metrics,
    ]
    assert main(["train", *small_run(tmp_path, *words, "schedule.warmup_steps=0")]) == 0
    lines = [line for rank in (0, 1) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
    processes = {int(line.split()[0]) for line in lines}
    assert {line.split()[1].removeprefix("::ffff:") for line in lines} == {"127.0.0.1"}
    assert len(processes - {os.getpid()}) >= 2, "each rank listens for its peers"
