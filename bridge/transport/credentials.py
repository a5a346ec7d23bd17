"""What lets a client in: the token, and PEM certificates and keys, from values, files, options or the environment.

A secret is never shown: `repr` of all that holds one is without it, and so are the messages of errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import hmac
import os
from typing import Any, TypeAlias

from bridge.errors import SettingError

__all__ = [
    "TOKEN_VARIABLE",
    "ClientCredentials",
    "Pem",
    "Token",
    "TokenLike",
    "add_credential_options",
    "credential_keywords",
    "read_pem",
    "read_token",
]

TOKEN_VARIABLE = "BRIDGE_TOKEN"
"""The environment variable that holds the token where neither `token` nor `token_file` is given."""
_MAX_TOKEN = 4096


class Token:
    """A bearer token: visible ASCII characters, 1 to 4096 of them. Shown by no `repr`, `str` or message.

    Args:
        value: The token.

    Raises:
        SettingError: It is no token.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):
            raise SettingError(f"expected the token to be a string, got a {type(value).__name__}")
        if not 0 < len(value) <= _MAX_TOKEN or not all("!" <= character <= "~" for character in value):
            raise SettingError(
                f"expected a token of 1 to {_MAX_TOKEN} visible ASCII characters without spaces, got {len(value)} "
                "characters that are none; `python -c 'import secrets; print(secrets.token_urlsafe(32))'` makes one"
            )
        self._value = value

    def reveal(self) -> str:
        """Return the secret itself."""
        return self._value

    def matches(self, shown: str | None) -> bool:
        """Tell whether a token that somebody showed is this one, in a time that does not depend on how it differs."""
        return hmac.compare_digest(self._value.encode(), (shown or "").encode(errors="replace"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash((Token, self._value))

    def __reduce__(self) -> tuple[type[Token], tuple[str]]:
        return Token, (self._value,)

    def __repr__(self) -> str:
        return "Token(…)"


TokenLike: TypeAlias = "str | Token"
"""What `token=` takes."""
Pem: TypeAlias = "str | os.PathLike[str] | bytes"
"""A PEM file's path, or what is in it."""


def read_token(
    token: TokenLike | None, token_file: str | os.PathLike[str] | None, *, name: str = "token"
) -> Token | None:
    """Return the token of a value, a file, or else of the environment variable `BRIDGE_TOKEN`; None: there is none.

    Args:
        token: The token itself.
        token_file: A file that holds it; blanks and line ends around it do not count.
        name: What the keyword is called, for messages; that of the file ends in `_file`.

    Raises:
        SettingError: Both are given, the file cannot be read, or what is there is no token.
    """
    if token is not None and token_file is not None:
        raise SettingError(f"expected {name} or {name}_file, got both; give one of them")
    if token_file is not None:
        text = _read_file(f"{name}_file", token_file)
        try:
            return Token(text.decode("ascii", errors="replace").strip())
        except SettingError as error:
            raise SettingError(f"{name}_file={os.fspath(token_file)!r}: {error}") from None
    if token is not None:
        return token if isinstance(token, Token) else Token(token)
    found = os.environ.get(TOKEN_VARIABLE)
    if not found:
        return None
    try:
        return Token(found.strip())
    except SettingError as error:
        raise SettingError(f"the environment variable {TOKEN_VARIABLE}: {error}") from None


def read_pem(name: str, value: Pem | None) -> bytes | None:
    """Return the bytes of a PEM file that is given by its path or its content.

    Args:
        name: The keyword, for messages.
        value: A path, or bytes.

    Raises:
        SettingError: It cannot be read, or holds no PEM.
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike, bytes)):
        raise SettingError(f"expected {name} to be a path or the bytes of a PEM file, got a {type(value).__name__}")
    data = value if isinstance(value, bytes) else _read_file(name, value)
    if b"-----BEGIN " not in data:
        raise SettingError(
            f"expected {name} to be a PEM file, which has a line -----BEGIN …-----; got {len(data)} bytes without one"
        )
    return data


def _read_file(name: str, path: Any) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SettingError(
            f"cannot read {name}={os.fspath(path)!r}: {error.strerror}. Expected a file that this user may read"
        ) from error


@dataclasses.dataclass(frozen=True)
class ClientCredentials:
    """What a client shows, and by what it knows its server."""

    token: Token | None = None
    """Shown to the server; None: no token."""
    tls_ca: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the authorities of the server's certificate; None: those of the system."""
    tls_certificate: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the client's own certificate, for a server that asks for one."""
    tls_key: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the key of `tls_certificate`."""
    tls_server_name: str | None = None
    """The name that the server's certificate must hold; None: the URL's host."""
    from_environment: bool = dataclasses.field(default=False, repr=False)
    """Whether the token is that of the environment variable."""

    @classmethod
    def of(
        cls,
        *,
        token: TokenLike | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: Pem | None = None,
        tls_certificate: Pem | None = None,
        tls_key: Pem | None = None,
        tls_server_name: str | None = None,
    ) -> ClientCredentials:
        """Read what the keywords of `make_remote` and `make_vec_remote` say.

        Raises:
            SettingError: Something cannot be read, or a certificate is without its key.
        """
        if (tls_certificate is None) != (tls_key is None):
            raise SettingError("expected tls_certificate and tls_key together, got one of them")
        if tls_server_name is not None:
            _check_server_name(tls_server_name)
        return cls(
            read_token(token, token_file),
            read_pem("tls_ca", tls_ca),
            read_pem("tls_certificate", tls_certificate),
            read_pem("tls_key", tls_key),
            tls_server_name,
            token is None and token_file is None,
        )

    def with_token_of(self, other: ClientCredentials, url: str) -> ClientCredentials:
        """Return these credentials with the token of a URL, where it has one.

        Raises:
            SettingError: A keyword gives another one.
        """
        if other.token is None:
            return self
        if self.token is not None and not self.from_environment and self.token != other.token:
            raise SettingError(f"expected token= or a token in the URL {url!r}, got both, which differ; give one")
        return dataclasses.replace(self, token=other.token, from_environment=False)

    @property
    def has_tls(self) -> bool:
        """Whether something is given that only TLS uses."""
        return any(item is not None for item in (self.tls_ca, self.tls_certificate, self.tls_server_name))

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that make equal credentials; the token in a form that does not print."""
        names = ("tls_ca", "tls_certificate", "tls_key", "tls_server_name")
        given = {name: getattr(self, name) for name in names}
        if not self.from_environment:
            given["token"] = self.token
        return {name: value for name, value in given.items() if value is not None}


def _check_server_name(name: Any) -> None:
    """Raise SettingError where a certificate can hold no such name."""
    try:
        fits = isinstance(name, str) and bool(name.encode("idna")) and not set(name) & set("/:?#@ ")
    except UnicodeError:
        fits = False
    if not fits:
        raise SettingError(
            "expected tls_server_name to be the name in the server's certificate, such as envs.example.org, "
            f"got {name!r:.80}"
        )


_OPTIONS = {
    "token": (
        "TEXT",
        "the secret that the server requires; others on this machine can read it in the list of processes",
    ),
    "token_file": ("FILE", f"a file that holds the token (default: the environment variable {TOKEN_VARIABLE})"),
    "tls_ca": ("FILE", "for grpcs://: the authorities of the server's certificate (default: the system's)"),
    "tls_certificate": ("FILE", "for a server that asks for one: the client's certificate"),
    "tls_key": ("FILE", "the key of --tls-certificate"),
    "tls_server_name": ("NAME", "the name that the server's certificate holds (default: the URL's host)"),
}


def add_credential_options(parser: argparse.ArgumentParser, prefix: str = "", title: str = "credentials") -> None:
    """Add the options of a command that connects: the keywords of `ClientCredentials.of`.

    Args:
        parser: The command's.
        prefix: What the options' names begin with, such as `upstream-`; with one, no environment variable counts.
        title: What the help calls them.
    """
    group = parser.add_argument_group(f"{title} (certificates and keys are PEM files)")
    for name, (metavar, text) in _OPTIONS.items():
        if prefix:
            text = text.replace("--", f"--{prefix}").partition(f" (default: the environment variable {TOKEN_VARIABLE}")[
                0
            ]
        group.add_argument(f"--{prefix}{name.replace('_', '-')}", metavar=metavar, help=text)


def credential_keywords(arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """Return what the command line says, as keywords of `ClientCredentials.of`, `make_remote` and `make_vec_remote`.

    Args:
        arguments: The command line.
        prefix: As for `add_credential_options`.
    """
    before = prefix.replace("-", "_")
    return {name: value for name in _OPTIONS if (value := getattr(arguments, f"{before}{name}")) is not None}
