"""The verb `plan`: a run, a sweep or every recipe on every GPU, described without running anything."""

import argparse
import json

from lightning_llm.plan.matrix import matrix_facts, matrix_of, render_matrix
from lightning_llm.plan.report import notes, plan_facts, render
from lightning_llm.run.checked_plan import checked_plan


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of one run, with --matrix how every recipe would run where, with -m the jobs of a sweep.

    As text or, with --json, as data.
    """
    if arguments.multirun:
        from lightning_llm.sweep.outline import outline

        return outline(arguments)
    planned = checked_plan(arguments, to_train=False)
    if arguments.matrix:
        made = matrix_of(planned.config)
        print(json.dumps(matrix_facts(made), indent=1) if arguments.json else render_matrix(made))
        return 0
    facts = plan_facts(planned)
    print(
        json.dumps(facts, indent=1) if arguments.json else "\n".join([render(facts), *notes(planned, to_train=False)])
    )
    return 0
