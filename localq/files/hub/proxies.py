"""Proxies and certificates that environment variables name, for the connection to the hub.

The HTTP library reads HTTP_PROXY, HTTPS_PROXY, ALL_PROXY (or lower case), NO_PROXY, SSL_CERT_FILE and SSLKEYLOGFILE,
and raises errors of many kinds for values that it cannot use. Here such an error gets the name of its variable.
"""

from __future__ import annotations

import importlib.util
import os
from urllib.parse import urlsplit

from localq.errors import ExitCode, LocalqError

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_SOCKS = ("socks5", "socks5h")
_SCHEMES = ("http", "https", *_SOCKS)
_FILES = ("SSL_CERT_FILE", "SSLKEYLOGFILE")
_FILE_STEPS = {
    "SSL_CERT_FILE": "Set it to the path of a PEM certificate file, or unset it.",
    "SSLKEYLOGFILE": "Set it to the path of a writable file, or unset it.",
}
_NEEDS = "Use a URL such as http://HOST:PORT or socks5://HOST:PORT, or unset the variable."


def use_known_schemes() -> None:
    """Write socks://, as desktops set it, as socks5:// in this process's environment, as the HTTP library reads it."""
    for name, value in _variables().items():
        scheme, colon, rest = value.strip().partition("://")
        if colon and scheme.casefold() == "socks":
            os.environ[name] = f"socks5://{rest}"


def check_files() -> None:
    """Raises LocalqError (exit 6) for a variable whose file the HTTP library would read or write without an end."""
    for name in _FILES:
        value = os.environ.get(name)
        if value and os.path.lexists(value) and not os.path.isfile(value):
            raise LocalqError(name, "not a regular file", _FILE_STEPS[name], ExitCode.NETWORK)


def setup_error(error: Exception) -> LocalqError:
    """The error (exit 6) for `error`, with which the HTTP library failed to start: it names the variable."""
    for name, value in _variables().items():
        if found := _fault(value):
            why, step = found
            return LocalqError(name, why, step, ExitCode.NETWORK)
    if isinstance(error, OSError) and (name := next((each for each in _FILES if os.environ.get(each)), "")):
        import ssl  # an ssl.SSLError is an OSError

        why = "the file contains no certificates" if isinstance(error, ssl.SSLError) else f"{error.strerror or error}"
        return LocalqError(name, why, _FILE_STEPS[name], ExitCode.NETWORK)
    why = f"the HTTP library failed to initialize ({type(error).__name__})"
    return LocalqError("network", why, "Check HTTPS_PROXY, ALL_PROXY and NO_PROXY.", ExitCode.NETWORK)


def variable_for(address: str) -> str:
    """The variable whose proxy requests to `address` use; "" for none."""
    try:
        parts = urlsplit(address)
    except ValueError:  # not an address
        return ""
    import urllib.request  # start-up cost: only a request needs it

    given = urllib.request.getproxies_environment()
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return ""
    kind = next((each for each in (parts.scheme, "all") if given.get(each)), "")
    names = [f"{kind}_proxy", f"{kind}_PROXY".upper()] if kind else []  # lower case takes precedence
    return next((name for name in names if os.environ.get(name)), "")


def _variables() -> dict[str, str]:
    """Name -> value of the variables that set proxies."""
    return {name: value for name, value in os.environ.items() if name.casefold() in _PROXIES and value}


def _fault(value: str) -> tuple[str, str] | None:
    """Return why `value` is no usable proxy, and the next step; None if it is one. It may contain a password."""
    address = value if "://" in value else f"http://{value}"
    scheme = address.partition("://")[0].casefold()
    if not value.isprintable() or scheme != scheme.strip():
        return "contains spaces or control characters", _NEEDS
    if scheme not in _SCHEMES:
        return f"{scheme}:// proxies are not supported", _NEEDS
    try:
        parts = urlsplit(address)
        if not parts.hostname or parts.port == 0:
            return "has no host name", _NEEDS
    except ValueError:
        return "not a valid URL", _NEEDS
    if scheme in _SOCKS and importlib.util.find_spec("socksio") is None:
        return (
            "SOCKS proxies require the socksio package",
            "Run `python -m pip install socksio`, or unset the variable.",
        )
    return None
