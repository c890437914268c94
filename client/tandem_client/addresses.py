"""Checks the address of a service, and whether it is on this machine."""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import httpx

MAX_PORT = 65535
_USER_INFO = re.compile(r"(?:(?<=//)|^)[^/?#]*@")
_IS_HTTP = re.compile(r"https?://[^/]", re.IGNORECASE)


def checked_url(url: str) -> str:
    """Return a service's URL without slashes at its end.

    Raises:
        ValueError: it is not an ``http://`` or ``https://`` URL.

    """
    shown = without_user(url)
    if not _IS_HTTP.match(url):
        host = shown.rpartition("://")[2].lstrip("/") or "HOST:PORT"
        raise ValueError(f"the address is {shown!r}; write http://{host}")
    try:
        parts = httpx.URL(url)
        parts.raw_host.decode("ascii").encode("idna")  # as the system's resolver is asked
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{shown} is no address: {error}") from error
    if (parts.port or 0) > MAX_PORT:  # the event loop would raise OverflowError
        raise ValueError(f"{shown} is no address: ports end at {MAX_PORT}")
    return url.rstrip("/")


def without_user(url: str) -> str:
    """Return a URL for messages, without a user name and password."""
    return _USER_INFO.sub("", url)


def is_loopback(address: str) -> bool:
    """Whether ``address``, a URL or HOST:PORT, is on this machine.

    Then no proxy is used, despite HTTP_PROXY, so that photo and key stay on this machine.
    """
    try:
        host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        try:
            ip = ipaddress.ip_address(socket.inet_aton(host))  # 127.1, 2130706433
        except (OSError, ValueError):
            return False
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return bool(mapped.is_loopback or mapped.is_unspecified)
