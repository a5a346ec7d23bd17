"""TLS without a socket: the settings of either end, and one end of a stream, bytes in and bytes out."""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bridge.core.transport.credentials import ClientCredentials
from bridge.errors import SettingError

__all__ = ["Tls", "client_context", "explain", "server_context"]

_CHUNK = 1 << 16
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which the module `ssl` has no name.
_NO_CHECK_TIME = 0x200000


def server_context(certificate: bytes, key: bytes, client_ca: bytes | None, *alpn: str) -> ssl.SSLContext:
    """Return the SSLContext of a server.

    Args:
        certificate: PEM: the server's certificate, and those between it and its CA.
        key: PEM: the key of the certificate.
        client_ca: PEM: the CAs, one of which must have signed each client's certificate; None: clients need none.
        alpn: The names of the protocols inside TLS, the preferred one first.

    Raises:
        SettingError: The key belongs to another certificate or is encrypted, or the certificate is missing or not
            valid now.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # In TLS 1.2 a client could begin a new handshake at any time. Each costs the server a signature, and `write` fails
    # until it is done.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # no client resumes a session, and a client that only writes would never read tickets
    if alpn:
        context.set_alpn_protocols(alpn)
    _load_pair(context, certificate, key)
    _check_dates(context, certificate)
    if client_ca is not None:
        _load_authorities(context, "client_ca", client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@functools.lru_cache(maxsize=16)  # a vector of environments connects a hundred times with the same files
def client_context(credentials: ClientCredentials, alpn: str | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """Return the SSLContext of a client.

    Args:
        credentials: The certificate for the server, and the trusted CAs.
        alpn: The name of the protocol inside TLS; None: none is sent.
        verify: False to accept any certificate, of any name.

    Raises:
        SettingError: The certificate and its key do not belong together, or there is none in `tls_ca`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not verify:
        # The order matters: `ssl` refuses CERT_NONE while it checks names.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    if credentials.tls_ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, "ca", credentials.tls_ca)
    if credentials.tls_certificate is not None and credentials.tls_key is not None:
        _load_pair(context, credentials.tls_certificate, credentials.tls_key)
    return context


def _load_authorities(context: ssl.SSLContext, name: str, pem: bytes) -> None:
    try:
        # `ssl` accepts only ASCII, but CA files may contain names in any encoding between the certificates.
        context.load_verify_locations(cadata=pem.decode("ascii", errors="ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise SettingError(
            f"tls=TLS({name}=…) cannot be used: {explain(error)}. Expected a PEM file of certificates"
        ) from error


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:  # only this user can read it; `ssl` reads only files
        paths = Path(folder, "certificate"), Path(folder, "key")
        for path, data in zip(paths, (certificate, key), strict=True):
            path.write_bytes(data)
        try:
            # Without this, OpenSSL would ask for an encrypted key's password on the terminal, and wait.
            context.load_cert_chain(*paths, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise SettingError(
                f"tls=TLS(certificate=…, key=…) cannot be used: {explain(error)}. Expected a PEM certificate and its "
                "own key, not encrypted by a password"
            ) from error


def _check_dates(context: ssl.SSLContext, certificate: bytes) -> None:
    """Raise SettingError if a server's certificate is not valid now: no client would accept it."""
    if (found := _own_certificate(context, certificate)) is None:
        return
    begins, ends = (ssl.cert_time_to_seconds(found[name]) for name in ("notBefore", "notAfter"))
    if not begins <= time.time() <= ends:
        now = time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime())
        raise SettingError(
            f"tls=TLS(certificate=…) cannot be used: it is valid from {found['notBefore']} until {found['notAfter']}, "
            f"and now it is {now}; make a new one (`gymnasium-bridge cert` does), or set this machine's clock"
        )


def _own_certificate(context: ssl.SSLContext, certificate: bytes) -> Any:
    """Return a server's certificate as `SSLSocket.getpeercert` does; None: it is not for servers.

    The module `ssl` decodes only a certificate that the other end sent and that was verified, so a handshake is done in
    memory.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Trust the certificate itself, whoever signed it, and accept an expired one: the caller reports its dates.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(cadata=certificate.decode("ascii", errors="ignore"))
        asks = client.wrap_bio(back, there)
        # Three steps are enough: the client's hello, the server's certificate, and the client's check.
        for end in (asks, context.wrap_bio(there, back, server_side=True), asks):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return asks.getpeercert()
    except (ssl.SSLError, ValueError):
        return None


def explain(error: Exception) -> str:
    """Return the text of an OpenSSL error, without the position in its source."""
    text = str(error.args[-1]) if error.args else ""
    return re.sub(r" \(_ssl\.c:\d+\)$", "", text) or type(error).__name__


class Tls:
    """One end of a TLS stream. One thread may receive while another thread sends.

    The end of the stream is not authenticated by TLS: HTTP/2 detects incomplete data itself.

    Args:
        context: The result of `server_context` or `client_context`.
        host: On a client: the name or address that the server's certificate must contain; None: this is the server.
    """

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        # An SSLObject allows one call at a time, but one thread receives while another one sends.
        self._guard = threading.Lock()
        self.ready = False
        """True if the handshake is done, as seen from this end."""

    @property
    def has_output(self) -> bool:
        """True while a message of the handshake, or an alert, waits to be sent."""
        return self._outgoing.pending > 0

    def receive(self, data: bytes) -> bytes:
        """Take encrypted bytes; return the plain bytes that they complete.

        Raises:
            ssl.SSLError: The bytes are no TLS, or one end refuses the other; `send` then returns the alert.
        """
        parts = []
        with self._guard:
            self._incoming.write(data)
            try:
                if not self.ready:
                    self._object.do_handshake()
                    self.ready = True
                # `read` returns nothing after the other end has sent close_notify.
                while part := self._object.read(_CHUNK):
                    parts.append(part)
            except ssl.SSLWantReadError:
                pass
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, parts: Iterable[bytes | memoryview] = ()) -> bytes:
        """Return bytes to send: waiting ones of the handshake and alerts, and, once it is done, the encrypted parts."""
        with self._guard:
            for part in parts:
                rest = memoryview(part)
                while rest:  # a record at a time
                    rest = rest[self._object.write(rest) :]
            return self._outgoing.read()

    def take(self, outgoing: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Return the bytes to send now: none of `outgoing` before the handshake is done, and then all of it."""
        parts: list[bytes | memoryview] = []
        if self.ready:
            # Emptied, not replaced: the protocol appends to this list object.
            parts = outgoing[:]
            outgoing.clear()
        return [self.send(parts)] if parts or self.has_output else []
