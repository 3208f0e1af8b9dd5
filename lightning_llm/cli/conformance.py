"""The verb `conformance`: check our quantizers, eager and compiled, against recorded test vectors."""

import argparse
from collections import defaultdict

from lightning_llm.precision.conformance import Verdict, run_conformance


def conformance(arguments: argparse.Namespace) -> int:
    """Print passed and failed cases per recipe with the reasons of failures; return 1 if any failed."""
    failed = 0
    for compiled in (False,) if arguments.eager else (False, True):
        verdicts = run_conformance(arguments.folder, compiled)
        failed += _report(verdicts, "compiled" if compiled else "eager")
    return 1 if failed else 0


def _report(verdicts: list[Verdict], mode: str) -> int:
    by_recipe: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_recipe[verdict.recipe].append(verdict)
    width = max(map(len, by_recipe), default=0)
    for recipe, cases in by_recipe.items():
        passed = sum(case.passed for case in cases)
        print(f"{mode:<9}{recipe:<{width}}  {passed:>4} passed, {len(cases) - passed:>3} failed")
        for case in cases:
            if not case.passed:
                print(f"           {case.case}: {'; '.join(case.errors) or 'the case has no recorded values'}")
    failed = sum(not verdict.passed for verdict in verdicts)
    print(f"{mode}: {len(verdicts) - failed} passed, {failed} failed, {sum(v.checks for v in verdicts)} checks")
    return failed
