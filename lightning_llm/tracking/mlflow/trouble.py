"""What to do about an MLflow server that does not take a run's records, by what it answers."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Trouble(NamedTuple):
    """What to do, and whether trying again within seconds may help."""

    advice: str
    passes: bool


NO_ANSWER = Trouble("Check that it is up, or set logger.tracking_uri, or logger=none.", passes=True)
REFUSED = NO_ANSWER._replace(passes=False)
NOT_ALLOWED = Trouble(
    "It refuses these credentials: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, of an account that may write to the experiment.",
    passes=False,
)
TOO_LARGE = Trouble(
    "It, or a proxy before it, refuses requests of this size: raise the limit there (nginx: client_max_body_size).",
    passes=False,
)
DELETED = Trouble(
    "The experiment, or the run, was deleted there: restore it (mlflow experiments restore --experiment-id ID), or set "
    "run.experiment to another name.",
    passes=False,
)
BY_STATUS = {401: NOT_ALLOWED, 403: NOT_ALLOWED, 413: TOO_LARGE}
BY_CODE = {"UNAUTHENTICATED": NOT_ALLOWED, "PERMISSION_DENIED": NOT_ALLOWED}


def trouble_of(error: BaseException) -> Trouble:
    """Return what to do about what MLflow's client raised."""
    for each in _chain(error):
        if isinstance(each, ConnectionRefusedError):  # nobody listens at the address
            return REFUSED
        text = str(each)
        if "must be in the 'active' state" in text:
            return DELETED
        if (found := BY_CODE.get(str(getattr(each, "error_code", "")))) is not None:
            return found
        status = re.search(r"error code (\d{3})\b|\b(\d{3}) Client Error", text)
        if status and (found := BY_STATUS.get(int(status[1] or status[2]))) is not None:
            return found
    return NO_ANSWER


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from; urllib3 keeps a cause as `reason`, and among its arguments."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
