"""Secrets in addresses, left out of what is printed or written."""

import re

MASK = "***"
USER = re.compile(r"(?i)^([a-z][a-z0-9+.-]*://)([^/:@?#]*)(:[^?#]*)?@")
"""A scheme, a user, a password: up to the last @, for a password may hold one, and a slash."""
WORDS = re.compile(r"(?i)([?&;](?:[a-z_-]*(?:password|passwd|pwd|token|secret|key)[a-z_-]*)=)[^&;#]*")


def redact_uri(uri: str) -> str:
    """Return `uri` with passwords and tokens as `***`: before the host, and in what a query calls so.

    Of http a user without a password is a token, too.
    """

    def masked(found: re.Match[str]) -> str:
        scheme, user, password = found.group(1), found.group(2), found.group(3)
        if password is not None:
            return f"{scheme}{user}:{MASK}@"
        return f"{scheme}{MASK if scheme.lower().startswith('http') else user}@"

    return WORDS.sub(rf"\g<1>{MASK}", USER.sub(masked, uri))
