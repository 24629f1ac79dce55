"""Addresses fit to be shown: without passwords and tokens."""

from __future__ import annotations

import re

from sqlalchemy import exc, make_url


def masked(url: str) -> str:
    """The URL without its password, fit to be printed and written; a text that is no URL is not repeated at all."""
    if url.startswith("journal:"):
        return url
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        return "(not a URL)"
    hidden = {key: "***" for key in parsed.query if re.search("pass|pwd|secret|token", key, re.IGNORECASE)}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True)
