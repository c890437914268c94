"""API keys as text: their form, the file of keys, and the key that a client sends.

A key never becomes part of a message, and no command takes one as an argument: ps would show it.
"""

import re
import stat
from pathlib import Path

from app.environment import CALLERS_KEY_VARIABLE, callers_key_of_environment
from models.errors import TandemError

MIN_LENGTH = 24  # 144 bits of base64, 96 of hexadecimal: nobody tries them all
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1: what "Bearer" may carry
MAKE_ONE = "openssl rand -hex 32 makes one"


class ApiKeyError(TandemError):
    """Keys that cannot be read, or that are none."""

    code = "api_key"


def keys_in(text: str, where: str) -> list[str]:
    """Return the keys of ``text``, one a line; blank lines and those that begin with # are not.

    Raises:
        ApiKeyError: no key, or one that is too short or has other characters; named by its line.

    """
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    for number, key in keys:
        if len(key) < MIN_LENGTH:
            raise ApiKeyError(
                f"{where}, line {number}: a key of {len(key)} characters, the least is "
                f"{MIN_LENGTH}; {MAKE_ONE}"
            )
        if not TOKEN.fullmatch(key):
            raise ApiKeyError(
                f"{where}, line {number}: a key is letters, digits and ._~+/- with = at its end; "
                f"{MAKE_ONE}"
            )
    if not keys:
        raise ApiKeyError(f"{where} holds no key; {MAKE_ONE}, one a line")
    return [key for _, key in keys]


def read_key_file(path: Path) -> list[str]:
    """Return the keys of a file; :class:`ApiKeyError`: it cannot be read, or has none."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ApiKeyError(f"cannot read the keys of {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ApiKeyError(f"{path} is no text, so it holds no keys; {MAKE_ONE}") from None
    return keys_in(text, str(path))


def readable_by_others(path: Path) -> str | None:
    """Return a warning if the file's permissions let anybody but its owner read it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & (stat.S_IRGRP | stat.S_IROTH):
        return None
    return f"{path} may be read by others (mode {mode:03o}): chmod 600 {path}"


def sent_key(key_file: Path | None) -> str | None:
    """Return the key for a service that wants one: the file's first, or TANDEM_API_KEY's, or None.

    Raises:
        ApiKeyError: the file or the variable holds no key.

    """
    if key_file is not None:
        return read_key_file(key_file)[0]
    text = callers_key_of_environment()
    return keys_in(text, CALLERS_KEY_VARIABLE)[0] if text else None


def key_headers(key_file: Path | None) -> dict[str, str]:
    """Return :func:`sent_key` in its header; empty without a key; raises as that does."""
    key = sent_key(key_file)
    return {} if key is None else {"authorization": f"Bearer {key}"}
