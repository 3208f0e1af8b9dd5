"""Messages about an MLflow server that rejects records, by the exceptions of its client."""

import socket
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException, get_error_code

from lightning_llm.tracking.mlflow.store import open_store
from lightning_llm.tracking.mlflow.tracker import MLflowTracker
from lightning_llm.tracking.mlflow.writer import DELETED, NO_ANSWER, NOT_ALLOWED, REFUSED, TOO_LARGE, trouble_of
from tests.protocol_module import make_config


def of_status(status: int) -> MlflowException:
    """Return the exception of `mlflow.utils.rest_utils.verify_rest_response` for a body that is not JSON."""
    text = f"API request to endpoint /x failed with error code {status} != 200. Response body: 'no'"
    return MlflowException(text, error_code=get_error_code(status))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (of_status(401), NOT_ALLOWED),
        (of_status(403), NOT_ALLOWED),
        (of_status(413), TOO_LARGE),
        (of_status(502), NO_ANSWER),
        (RestException({"error_code": "PERMISSION_DENIED", "message": "no"}), NOT_ALLOWED),
        (TimeoutError("timed out"), NO_ANSWER),
    ],
)
def test_the_advice_is_about_what_the_server_answers(error: Exception, found: Any) -> None:
    assert trouble_of(error) == found


def test_a_deleted_experiment_is_named(store: MlflowClient, tmp_path: Path) -> None:
    client, experiment_id = open_store(f"sqlite:///{tmp_path}/mlflow.db", "trial")
    client.delete_experiment(experiment_id)
    with pytest.raises(MlflowException) as raised:
        client.create_run(experiment_id)
    assert trouble_of(raised.value) == DELETED


def test_a_server_that_refuses_connections_is_known_by_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(MlflowException) as raised:
        MlflowClient(f"http://127.0.0.1:{port}").search_experiments()
    assert trouble_of(raised.value) == REFUSED


def test_the_warning_has_the_advice_of_the_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = MLflowTracker(make_config(tmp_path), tmp_path)
    tracker._warn("MlflowException: ... error code 413", TOO_LARGE.advice)
    assert "cannot be written (MlflowException: ... error code 413)" in caplog.text
    assert "nginx: client_max_body_size" in caplog.text
    assert "Check that it is up" not in caplog.text
