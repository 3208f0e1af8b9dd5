"""What was evaluated after a run ended, brought to its run in MLflow."""

from pathlib import Path

from lightning_llm.config.schema import Config
from lightning_llm.tracking.mlflow.store import existing_store
from lightning_llm.tracking.mlflow.tracker import tracking_uri
from lightning_llm.tracking.mlflow.writer import RUN_ID_FILE, log_evaluations


def track_evaluations(config: Config, folder: Path) -> str:
    """Log what the run's folder holds of evaluations that MLflow has not; return what keeps it from that, or "".

    A run that was not tracked stays so. MLflow's trouble is no trouble of the evaluation: `sync` brings it later.
    """
    file = folder / RUN_ID_FILE
    if config.logger.name != "mlflow" or not file.is_file():
        return ""
    try:
        client = existing_store(tracking_uri(config))
        log_evaluations(client, file.read_text(encoding="utf-8").strip(), folder)
    except Exception as error:  # of many kinds: requests', sqlalchemy's, mlflow's own
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""
