"""Classifies addresses: whether a service is on this machine."""

import ipaddress
import socket
from urllib.parse import urlsplit


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
