"""Credentials: the token, and PEM certificates and keys, from values, files, options or the environment.

A secret is never shown: neither the `repr` of an object that holds one nor an error message contains it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hmac
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

from bridge.core.keywords import grouped
from bridge.core.logs import warn
from bridge.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "TLS",
    "TOKEN_VARIABLE",
    "Access",
    "AccessKeywords",
    "ClientAccess",
    "ClientCredentials",
    "Pem",
    "Token",
    "TokenLike",
    "add_credential_options",
    "checked_tls",
    "credential_keywords",
    "file_error",
    "given_access",
    "read_pem",
    "read_token",
    "shown_file",
    "warn_of_readers",
    "write_secret",
]

TOKEN_VARIABLE = "BRIDGE_TOKEN"
"""The environment variable that holds the token if neither `token` nor `token_file` is given."""
_MAX_TOKEN = 4096


class Token:
    """A bearer token: 1 to 4096 visible ASCII characters. No `repr`, `str` or message shows it.

    Args:
        value: The token.

    Raises:
        SettingError: The value is no token.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):
            raise SettingError(f"expected the token to be a string, got a {type(value).__name__}")
        if not 0 < len(value) <= _MAX_TOKEN or not all("!" <= character <= "~" for character in value):
            wrong = sum(not "!" <= character <= "~" for character in value)
            got = f"{len(value)} characters, {wrong} of them others" if value else "nothing: it is empty"
            got = f"{len(value)} characters" if value and not wrong else got
            raise SettingError(
                f"expected a token of 1 to {_MAX_TOKEN} visible ASCII characters without spaces, got {got}; "
                "`gymnasium-bridge token` makes one"
            )
        self._value = value

    def reveal(self) -> str:
        """Return the secret."""
        return self._value

    def equals(self, shown: str | None) -> bool:
        """True if a received token is this one. The time does not depend on where they differ."""
        # Compare bytes: `compare_digest` accepts only ASCII text, and a client may send anything.
        return hmac.compare_digest(self._value.encode(), (shown or "").encode(errors="replace"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.equals(other._value)

    def __hash__(self) -> int:
        return hash((Token, self._value))

    def __reduce__(self) -> tuple[type[Token], tuple[str]]:
        return Token, (self._value,)

    def __repr__(self) -> str:
        return "Token(…)"


TokenLike: TypeAlias = "str | Token"
"""The types that `token=` takes."""
Pem: TypeAlias = "str | os.PathLike[str] | bytes"
"""A PEM file's path, or its content."""


def read_token(token: TokenLike | None, file: str | os.PathLike[str] | None, *, name: str = "token") -> Token | None:
    """Return the token of a value, a file, or else of the environment variable `BRIDGE_TOKEN`; None: there is none.

    Args:
        token: The token.
        file: A file that contains it; whitespace around it is ignored.
        name: The name of the keyword, for messages; the file's ends in `_file`.

    Raises:
        SettingError: Both are given, the file cannot be read, or the text is no token.
    """
    if token is not None and file is not None:
        raise SettingError(f"expected {name} or {name}_file, got both; give one of them")
    if file is not None:
        try:
            text = _read_bytes(file)
        except (OSError, ValueError) as error:
            raise file_error(f"{name}_file={shown_file(file)}", error) from None
        try:
            return Token(text.decode("ascii", errors="replace").strip())
        except SettingError as error:
            raise SettingError(f"{name}_file={os.fspath(file)!r}: {error}") from None
    if token is not None:
        return token if isinstance(token, Token) else Token(token)
    if not (found := os.environ.get(TOKEN_VARIABLE)):
        return None
    try:
        return Token(found.strip())
    except SettingError as error:
        raise SettingError(f"the environment variable {TOKEN_VARIABLE}: {error}") from None


def read_pem(name: str, value: Pem | None) -> bytes | None:
    """Return the bytes of a PEM file, given by its path or its content.

    Args:
        name: The field of `TLS`, for messages.
        value: A path, or bytes.

    Raises:
        SettingError: The file cannot be read, or contains no PEM.
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike, bytes)):
        raise SettingError(
            f"expected tls=TLS({name}=…) to be a path or the bytes of a PEM file, got a {type(value).__name__}"
        )
    if not isinstance(value, bytes):
        try:
            value = _read_bytes(value)
        except (OSError, ValueError) as error:
            text = os.fspath(value)
            if "-----BEGIN " in text:
                raise SettingError(
                    f"expected tls=TLS({name}=…) to be a path or the bytes of a PEM file, got its content as a str; "
                    "encode() it"
                ) from None
            raise file_error(f"tls=TLS({name}={text!r})", error) from None
    if b"-----BEGIN " not in value:
        raise SettingError(
            f"expected tls=TLS({name}=…) to be a PEM file, which has a line -----BEGIN …-----; got {len(value)} bytes "
            "without one"
        )
    return value


def shown_file(path: str | os.PathLike[str]) -> str:
    """Return the path of a secret's file as messages show it: "…" if it may be the secret itself.

    If the file or its folder exists, a path was meant. A bare name may be the secret, given by mistake.
    """
    folder = os.path.dirname(os.fspath(path))
    # A leading slash makes the root the folder, but a Base64 text may begin with a slash too.
    is_file = os.path.lexists(path) or (len(folder) > 1 and os.path.isdir(folder)) or folder == "."
    return repr(os.fspath(path)) if is_file else "…"


def _read_bytes(path: Any) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def file_error(what: str, error: OSError | ValueError) -> SettingError:
    """Return the error for a file that cannot be read.

    Args:
        what: The keyword or option that gave the path, and the path, see `shown_file`.
        error: The error of opening it; a ValueError for a path that no file can have.
    """
    reason = error.strerror if isinstance(error, OSError) else str(error)
    hidden = "; the name is left out here, as it may be the secret itself" if what.endswith("…") else ""
    return SettingError(f"cannot read {what}: {reason}. Expected the path of a file that this user may read{hidden}")


def write_secret(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that only its owner can read.

    Raises:
        SettingError: The file exists already, or cannot be written.
    """
    try:
        # Create it with this mode: between writing a file and `chmod`, others could open it.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise SettingError(f"{os.fspath(path)} already exists; delete it, or choose another name") from None
    except OSError as error:
        raise SettingError(f"cannot write {os.fspath(path)}: {error.strerror}") from None


def warn_of_readers(path: str | os.PathLike[str]) -> None:
    """Warn if other users of this machine can read a file with a secret. Windows does not tell."""
    if os.name == "posix" and os.stat(path).st_mode & stat.S_IROTH:
        text = (
            f"other users of this machine can read the token in {os.fspath(path)}: run `chmod 600 {os.fspath(path)}`; "
            "`gymnasium-bridge token --out FILE` makes a file that only you can read"
        )
        warn(text)


@dataclasses.dataclass(frozen=True)
class TLS:
    """Certificates and keys: `tls=` of a server (`serve_gym`) and of a client (`make_remote`).

    Each is a PEM file: its path, or its content as bytes. `gymnasium-bridge cert` makes a set of them.

    Examples:
        >>> from bridge import TLS
        >>> of_a_server = TLS(certificate="certs/server.pem", key="certs/server.key")
        >>> of_a_client = TLS(ca="certs/ca.pem")

    Args:
        certificate: A server's certificate: its port then speaks only TLS. Or a client's certificate, for a server
            that asks for one.
        key: The private key of `certificate`.
        client_ca: On a server: the CA that must have signed each client's certificate; None: clients need none.
        ca: On a client, for `grpcs://` URLs: the CA that signed the server's certificate; None: the system's CAs.
        server_name: On a client: the name that the server's certificate must contain, if it is not the host of the
            URL; None: the URL's host.

    Raises:
        SettingError: One of `certificate` and `key` is given without the other.
    """

    certificate: Pem | None = None
    key: Pem | None = None
    client_ca: Pem | None = None
    ca: Pem | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise SettingError("expected tls=TLS(certificate=…, key=…), got one of them")
        if self.server_name is not None:
            _check_server_name(self.server_name)

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = (
            f"{name}={'…' if name == 'key' or isinstance(value, bytes) else repr(value)}"
            for name, value in given.items()
            if value is not None
        )
        return f"TLS({', '.join(shown)})"

    def read(self) -> TLS:
        """Return a copy with the content of files in place of their paths.

        Raises:
            SettingError: A file cannot be read, or contains no PEM.
        """
        pem = {name: read_pem(name, getattr(self, name)) for name in ("certificate", "key", "client_ca", "ca")}
        return TLS(**pem, server_name=self.server_name)


class AccessKeywords(TypedDict, total=False):
    """The keywords of `Access`, for type checkers."""

    token: TokenLike | None
    token_file: str | os.PathLike[str] | None
    tls: TLS | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """The credentials that every call that connects or listens takes as keywords.

    Each end defines the meaning of `tls` in a class of its own.

    Args:
        token: The secret that clients send and the server expects; None: the token in `token_file`, or else in the
            environment variable `BRIDGE_TOKEN`.
        token_file: A file that contains the token.
    """

    token: TokenLike | None = dataclasses.field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    tls: TLS | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientAccess(Access):
    """The credentials that a client sends, and those by which it verifies its server.

    Args:
        tls: With TLS, as for `grpcs://` and `wss://`: the CA of the server's certificate, `TLS(ca="ca.pem")`, and a
            certificate if the server asks for one. None: the system's CAs, and no certificate.

    Raises:
        SettingError: A file cannot be read, a value is given twice, or is for servers.
    """

    credentials: ClientCredentials = dataclasses.field(init=False, repr=False)
    """The credentials that were read from the keywords."""

    def __post_init__(self) -> None:
        tls = checked_tls(self.tls)
        if tls.client_ca is not None:
            raise SettingError(
                "tls=TLS(client_ca=…) is for servers, which ask clients for certificates; the CA of the server's "
                "certificate is tls=TLS(ca=…)"
            )
        credentials = ClientCredentials(
            read_token(self.token, self.token_file),
            read_pem("ca", tls.ca),
            read_pem("certificate", tls.certificate),
            read_pem("key", tls.key),
            tls.server_name,
            self.token is None and self.token_file is None and bool(os.environ.get(TOKEN_VARIABLE)),
        )
        object.__setattr__(self, "credentials", credentials)
        for name in ("token", "token_file"):  # the token is in `credentials`, which does not print it
            object.__setattr__(self, name, None)


def given_access(keywords: Mapping[str, Any]) -> AccessKeywords:
    """Return those keywords of a call that belong to `Access`."""
    given = {name: value for name, value in keywords.items() if name in AccessKeywords.__annotations__}
    return cast(AccessKeywords, given)


@dataclasses.dataclass(frozen=True)
class ClientCredentials:
    """The secrets that a client sends, and the certificates by which it verifies its server."""

    token: Token | None = None
    """Sent to the server; None: no token."""
    tls_ca: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the CA that signed the server's certificate; None: the system's CAs."""
    tls_certificate: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the client's own certificate, for a server that asks for one."""
    tls_key: bytes | None = dataclasses.field(default=None, repr=False)
    """PEM: the key of `tls_certificate`."""
    tls_server_name: str | None = None
    """The name that the server's certificate must contain; None: the URL's host."""
    from_environment: bool = dataclasses.field(default=False, repr=False)
    """True if the token is from the environment variable."""

    @classmethod
    @grouped(ClientAccess, tls=TLS)
    def of(cls, **keywords: Unpack[AccessKeywords]) -> ClientCredentials:
        """Read the keywords of `make_remote` and `make_vec_remote`.

        Args:
            keywords: The fields of `ClientAccess`, which the signature lists.

        Raises:
            SettingError: A file cannot be read, a value is given twice, or is for servers.
        """
        return ClientAccess(**keywords).credentials

    def with_token_of(self, other: ClientCredentials, url: str) -> ClientCredentials:
        """Return these credentials with the token of a URL, if it has one.

        Raises:
            SettingError: A keyword gives another token.
        """
        if other.token is None:
            return self
        if self.token is not None and not self.from_environment and self.token != other.token:
            raise SettingError(f"expected token= or a token in the URL {url!r}, got both, which differ; give one")
        return dataclasses.replace(self, token=other.token, from_environment=False)

    @property
    def has_tls(self) -> bool:
        """True if a value is given that only TLS uses."""
        return any(item is not None for item in (self.tls_ca, self.tls_certificate, self.tls_server_name))

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that make equal credentials, with the token in a form that does not print it."""
        found: dict[str, Any] = {}
        if not self.from_environment and self.token is not None:
            found["token"] = self.token
        tls = TLS(self.tls_certificate, self.tls_key, None, self.tls_ca, self.tls_server_name)
        return found if tls == TLS() else {**found, "tls": tls}


def checked_tls(tls: Any) -> TLS:
    """Return the keyword `tls`, an empty TLS for None; raise SettingError if it has another type."""
    if tls is not None and not isinstance(tls, TLS):
        raise SettingError(f"expected tls to be bridge.TLS(…), got a {type(tls).__name__}")
    return tls or TLS()


def _check_server_name(name: Any) -> None:
    """Raise SettingError if no certificate can contain such a name."""
    try:
        fits = isinstance(name, str) and bool(name.encode("idna")) and not set(name) & set("/:?#@ ")
    except UnicodeError:
        fits = False
    if not fits:
        raise SettingError(
            "expected tls=TLS(server_name=…) to be the name in the server's certificate, such as envs.example.org, "
            f"got {name!r:.80}"
        )


_TOKEN_OPTIONS = {
    "token": (
        "TEXT",
        "the token that clients show and the server expects; other users of this machine can see it in the list of "
        "processes",
    ),
    "token_file": ("FILE", f"a file that holds the token (default: the environment variable {TOKEN_VARIABLE})"),
}
_CLIENT_OPTIONS = {
    **_TOKEN_OPTIONS,
    "tls_ca": ("FILE", "for grpcs://: the CA that signed the server's certificate (default: the system's CAs)"),
    "tls_certificate": ("FILE", "for a server that asks for one: the client's certificate"),
    "tls_key": ("FILE", "the key of --tls-certificate"),
    "tls_server_name": ("NAME", "the name that the server's certificate holds (default: the URL's host)"),
}
_SERVER_OPTIONS = {
    **_TOKEN_OPTIONS,
    "tls_certificate": ("FILE", "the server's certificate: the port speaks TLS only"),
    "tls_key": ("FILE", "the key of --tls-certificate"),
    "tls_client_ca": ("FILE", "the CA that must have signed each client's certificate (default: clients need none)"),
}


def add_credential_options(
    parser: argparse.ArgumentParser, prefix: str = "", title: str = "credentials", *, listens: bool = False
) -> None:
    """Add the options of `Access` and of the fields of `TLS` to a command.

    Args:
        parser: The command's parser.
        prefix: The first part of the options' names, such as `upstream-`; with a prefix, no environment variable is
            read.
        title: The title of the group in the help.
        listens: True if the command listens, False if it connects.
    """
    group = parser.add_argument_group(f"{title} (certificates and keys are PEM files)")
    for name, (metavar, text) in (_SERVER_OPTIONS if listens else _CLIENT_OPTIONS).items():
        if prefix:
            text = text.replace("--", f"--{prefix}").partition(f" (default: the environment variable {TOKEN_VARIABLE}")[
                0
            ]
        group.add_argument(f"--{prefix}{name.replace('_', '-')}", metavar=metavar, help=text)


def credential_keywords(arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """Return the options of the command line as the keywords of `Access`.

    Args:
        arguments: The command line.
        prefix: As for `add_credential_options`.
    """
    before = prefix.replace("-", "_")
    names = {**_CLIENT_OPTIONS, **_SERVER_OPTIONS}
    given = {name: value for name in names if (value := getattr(arguments, f"{before}{name}", None)) is not None}
    tls = {name.removeprefix("tls_"): given.pop(name) for name in tuple(given) if name.startswith("tls_")}
    return {**given, "tls": TLS(**tls)} if tls else given
