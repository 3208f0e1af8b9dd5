"""Options that Hydra's own programs have, typed here out of habit. Imports no Hydra."""

from collections.abc import Collection

from lightning_llm.base.errors import ConfigError, Problem

HYDRA_OPTIONS = {
    "--info": "Write lightning-llm config --group for what can be composed, config for what is.",
    "--hydra-help": "Write lightning-llm VERB --help.",
    "--package": "Write lightning-llm config, which prints all groups.",
    "--resolve": "lightning-llm config prints what is resolved.",
    "--run": "Leave it out.",
    "--config-path": "Write --config-dir DIR, for further groups.",
    "--config-name": "Write recipe=NAME, from --config-dir DIR too.",
    "--shell-completion": "Write lightning-llm completion bash.",
    "--experimental-rerun": "Write --config FILE, a run's config.yaml.",
}
HYDRA_OPTIONS |= {
    short: HYDRA_OPTIONS[long]
    for short, long in (
        ("-i", "--info"),
        ("-p", "--package"),
        ("-r", "--run"),
        ("-cp", "--config-path"),
        ("-cd", "--config-path"),
        ("-cn", "--config-name"),
        ("-sc", "--shell-completion"),
    )
}
"""What to do here in place of an option that Hydra's own programs have."""


def without_hydra_options(argv: list[str], verbs: Collection[str]) -> list[str]:
    """Return the arguments with `--cfg job` behind one of `verbs` made into the verb `config`.

    Raises:
        ConfigError: for Hydra's other options, with what to write here.
    """
    if not argv or argv[0] not in verbs:
        return argv
    verb, rest = argv[0], []
    arguments = iter(argv[1:])
    for word in arguments:
        option, _, value = word.partition("=")
        if option in ("--cfg", "-c"):
            value = value or next(arguments, "job")
            if value != "job":
                raise ConfigError(Problem(f"{option} {value}", "Hydra only composes here. Write lightning-llm config."))
            verb = "config"
        elif option in HYDRA_OPTIONS:
            raise ConfigError(Problem(option, f"is Hydra's. {HYDRA_OPTIONS[option]}"))
        else:
            rest.append(word)
    return [verb, *rest]
