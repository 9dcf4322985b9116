"""Names databases and servers in messages without their passwords, in whatever form a password is written.

Everything before the last `@` counts as user and password, because people forget to write `@` as %40. A URL that cannot
be parsed for certain is shown as its scheme alone, and an option that is not known to be harmless as `***`.
"""

import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_HARMLESS = ("user", "host", "port", "dbname", "sslmode", "connect_timeout", "application_name", "target_session_attrs")


def split_url(url: str) -> SplitResult | None:
    """The parts of a URL; None for an invalid URL, such as one whose port is not a number."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def shown(url: str) -> str:
    """The URL as a message may show it."""
    scheme, slashes, rest = url.strip().partition("://")
    if not slashes:
        return url if re.fullmatch(r"[\w./ -]*", url) else "..."
    users, at, place = rest.rpartition("@")
    parts = split_url(f"{scheme}://{place}")
    scheme = re.sub(r"\+psycopg2?$", "", scheme)
    if parts is None or "?" in users or re.search("[:@=]", parts.path):
        return f"{scheme}://..."
    user, colon, _ = users.partition(":")
    user = user if re.fullmatch("[\\w.-]*", user) else "***"
    query = "&".join(f"{key}={'***' if hidden else value}" for key, value, hidden in _options(parts))
    return f"{scheme}://{user}{':***' if colon else ''}{at}{parts.netloc}{parts.path}{'?' if query else ''}{query}"


def hides(url: str) -> bool:
    """Whether a message must not show all of the URL: it may name a password."""
    return re.search(r"\*\*\*|\.\.\.$", shown(url)) is not None


def without_secrets(text: str, url: str) -> str:
    """A driver's message about a URL with at most one `@`, without the parts that `shown` hides."""
    users = url.partition("://")[2].rpartition("@")[0]
    secrets = [users.partition(":")[2], *(value for _, value, hidden in _options(urlsplit(url)) if hidden)]
    for secret in sorted(filter(None, {*secrets, *map(unquote, secrets)}), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _options(parts: SplitResult) -> list[tuple[str, str, bool]]:
    """(name, value, whether it may be a secret) of every option in the query."""
    found = parse_qsl(parts.query)
    return [(key, value, key not in _HARMLESS or not re.fullmatch(r"[\w./,-]*", value)) for key, value in found]
