"""Rows of a check that is measured here."""

from gpu_check import check_process


def measured(name, module, call, wanted=lambda item: True):
    """Return a check's rows, all its items measured, or those `wanted`."""
    check_process.measure(name, [item for item in module.items(call) if wanted(item.name)], call.journal, call.clock)
    return [row for found in call.journal.results(name).values() for row in found]


def statuses(found):
    return {row.what: row.note for row in found if row.status in ("off", "error")}
