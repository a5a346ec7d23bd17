"""Certificates for development: a CA of one's own, and certificates for a server and a client.

The command is `gymnasium-bridge cert`. The certificates encrypt the connection and keep strangers out. Only programs
that are given `ca.pem` trust them.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.core.extras import needed
from bridge.core.transport.credentials import write_secret
from bridge.errors import SettingError

__all__ = ["DAYS", "FILES", "make_certificates", "register", "run"]

DAYS = 365
"""Days that a certificate is valid by default."""
FILES = ("ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key")
"""The files that are made."""

_EPILOG = """examples:
  gymnasium-bridge cert --out certs --name gpu-box.lan --name 192.168.1.20
  gymnasium-bridge serve CartPole-v1 --host 0.0.0.0 --port 50051 --token-file token \\
      --tls-certificate certs/server.pem --tls-key certs/server.key
  gymnasium-bridge info grpcs://gpu-box.lan:50051 --token-file token --tls-ca certs/ca.pem
"""

# The package cryptography requires a value for each of them.
_KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def make_certificates(
    folder: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    days: float = DAYS,
    now: datetime.datetime | None = None,
) -> dict[str, Path]:
    """Make a CA, and certificates for a server and a client signed by it, in a folder that has none yet.

    Args:
        folder: The folder; created if it does not exist. Only this user can read the keys.
        names: The names and addresses by which clients reach the server, besides those of this machine.
        days: How long the certificates are valid.
        now: The beginning of their validity; None: the current time.

    Returns:
        The path of each of `FILES`, by its name.

    Raises:
        SettingError: A file exists already, a name or `days` fits no certificate, or the package `cryptography` is not
            installed.
    """
    if not days > 0:
        raise SettingError(f"expected days to be positive, got {days!r}")
    for name in names:
        if not name or any(map(str.isspace, name)):
            raise SettingError(f"expected names and addresses such as gpu-box.lan or 192.168.1.20, got {name!r}")
    paths = {name: Path(folder) / name for name in FILES}
    if there := [str(path) for path in paths.values() if path.exists()]:
        raise SettingError(f"{', '.join(there)} already exists; delete it, or choose another folder")
    # Allow for clocks of other machines that are behind this one.
    begin = now or datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(minutes=5)
    try:
        end = begin + datetime.timedelta(days=days)
    except OverflowError as error:
        raise SettingError(f"expected days to end before the year 10000, got {days!r}") from error
    authority = _Authority(begin, end)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"cannot make the folder {os.fspath(folder)!r}: {error.strerror or error}"
        raise SettingError(f"{text}. Expected one that is there, or that this user may make") from error
    reached = list(dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *names]))
    made = {
        "ca": (authority.certificate, authority.key),
        "server": authority.issue("server", reached),
        "client": authority.issue("client"),
    }
    for name, (certificate, key) in made.items():
        paths[f"{name}.pem"].write_bytes(certificate.public_bytes(authority.forms.Encoding.PEM))
        write_secret(paths[f"{name}.key"], authority.key_pem(key))
    return paths


class _Authority:
    """A certificate authority for one call of `make_certificates`.

    Args:
        begin: The beginning of its certificates' validity.
        end: The end of their validity.
    """

    def __init__(self, begin: datetime.datetime, end: datetime.datetime) -> None:
        with needed("certificates are made by the package cryptography", "cert"):
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        self._x509, self._hashes, self.forms, self._ec = x509, hashes, serialization, ec
        self._begin, self._end = begin, end
        self.key: Any = ec.generate_private_key(ec.SECP256R1())
        self._title = self._name("gymnasium-bridge development authority")
        builder = self._builder(self._title, self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        # RFC 5280 requires it, and Python's own clients check it since 3.13 (`ssl.VERIFY_X509_STRICT`).
        builder = builder.add_extension(self._key_usage("key_cert_sign"), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        self.certificate = self._sign(builder.add_extension(identifier, critical=False))

    def issue(self, name: str, reached: Sequence[str] = ()) -> tuple[Any, Any]:
        """Return a certificate and its key.

        Args:
            name: The certificate's use: `server` or `client`.
            reached: The names and addresses in a server's certificate.
        """
        x509 = self._x509
        usages = x509.oid.ExtendedKeyUsageOID
        usage = usages.SERVER_AUTH if name == "server" else usages.CLIENT_AUTH
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        builder = self._builder(self._name(f"gymnasium-bridge {name}"), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(self._key_usage("digital_signature"), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        if reached:
            alternatives = x509.SubjectAlternativeName([_general_name(x509, item) for item in reached])
            builder = builder.add_extension(alternatives, critical=False)
        return self._sign(builder), key

    def key_pem(self, key: Any) -> bytes:
        """Return a key as PEM, not encrypted."""
        forms = self.forms
        return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))

    def _name(self, text: str) -> Any:
        return self._x509.Name([self._x509.NameAttribute(self._x509.oid.NameOID.COMMON_NAME, text)])

    def _key_usage(self, name: str) -> Any:
        return self._x509.KeyUsage(**{**dict.fromkeys(_KEY_USAGES, False), name: True})

    def _builder(self, subject: Any, public_key: Any) -> Any:
        builder = self._x509.CertificateBuilder().subject_name(subject).issuer_name(self._title)
        builder = builder.public_key(public_key).serial_number(self._x509.random_serial_number())
        return builder.not_valid_before(self._begin).not_valid_after(self._end)

    def _sign(self, builder: Any) -> Any:
        return builder.sign(self.key, self._hashes.SHA256())


def _general_name(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        # Certificates contain a name with non-ASCII letters in the form of DNS, and clients compare that form.
        return x509.DNSName(name if name.isascii() else name.encode("idna").decode())
    except UnicodeError as error:
        raise SettingError(f"expected the name of a host, got {name!r:.80}: {error}") from error


def register(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command `cert` to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "cert",
        description="Make a CA for development, and certificates for a server and a client that it signs.",
        epilog=_EPILOG,
    )
    parser.add_argument("--out", default="certs", metavar="FOLDER", help="the output folder (default: certs)")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address by which clients reach the server; this machine's own are in it anyway",
    )
    parser.add_argument("--days", type=float, default=DAYS, help=f"how many days they are valid (default: {DAYS})")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the certificates, and print where they are and how to use each."""
    paths = make_certificates(arguments.out, arguments.name, days=arguments.days)
    print(f"wrote {arguments.out}, valid for {arguments.days:g} days:")
    server, key, ca = paths["server.pem"], paths["server.key"], paths["ca.pem"]
    print(f'  server: tls=TLS(certificate="{server}", key="{key}")')
    print(f"          or --tls-certificate {server} --tls-key {key}")
    print(f'  client: tls=TLS(ca="{ca}"), or --tls-ca {ca}; its URL begins with grpcs://')
    print(f'  to let in only clients with a certificate: client_ca="{ca}" in the server\'s TLS(…),')
    print(f"          or --tls-client-ca {ca}; and")
    own, own_key = paths["client.pem"], paths["client.key"]
    print(f'          certificate="{own}", key="{own_key}" in the client\'s')
    print(f"Keep {paths['ca.key']} to yourself: whoever has it can make certificates that your clients trust.")
    return 0
