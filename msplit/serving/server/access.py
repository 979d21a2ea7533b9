"""Proofs of who a client and a server are: bearer tokens, and certificates for TLS. Their files can be read again while a server runs."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from msplit.errors import LoadError
from msplit.formats.files import read_bytes, read_file
from msplit.serving.server import messages
from msplit.serving.server.config import parsed

_MOST = 1 << 20
"""Bytes of such a file."""
_TOKEN = re.compile(r"[a-zA-Z0-9._~+/-]+=*")
"""Bearer tokens of RFC 6750."""
_PEM = "-----BEGIN"
_EXAMPLE = "server_key: 'tls.key' server_cert: 'tls.crt' custom_ca: 'clients.crt' client_verify: true"


class Tokens:
    """Bearer tokens of a file. Only their hashes are kept.

    Args:
        path: File with a token on each line; empty lines and those that begin with ``#`` are left out.

    Raises:
        MsplitError: It can not be read, or has something else.
    """

    what = "tokens"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read()

    def read(self) -> None:
        """Reads the file again. Tokens that were taken before stay where it is wrong.

        Raises:
            MsplitError: It is.
        """
        self._known = {hashlib.sha256(token.encode()).digest() for token in tokens_of(self._path)}

    def allow(self, header: str) -> bool:
        """True where an ``authorization`` header has one of them; how long it takes tells nothing of them."""
        scheme, _, token = header.partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._known) > 0 and scheme.lower() == "bearer"


def tokens_of(path: Path) -> list[str]:
    """Bearer tokens of a file; see `Tokens`.

    Raises:
        MsplitError: It can not be read, or has something else.
    """
    fix = "write one token on each line, of letters, digits and -._~+/"
    lines = map(str.strip, read_file(path, _MOST, what="file of tokens", fix=fix).splitlines())
    tokens = {number: line for number, line in enumerate(lines, 1) if line and line[0] != "#"}
    wrong = [number for number, line in tokens.items() if not _TOKEN.fullmatch(line)]
    if wrong or not tokens:  # the line is not said: it may be a secret
        raise LoadError(f"line {wrong[0]} is no bearer token" if wrong else "has no token", where=str(path), fix=fix)
    return [*tokens.values()]


def client_credentials(authorities: Path, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """Credentials of a client for gRPC over TLS.

    Args:
        authorities: PEM file of the certificates that sign the server's.
        certificate: PEM file of the client's own certificate; None: it has none.
        key: PEM file of its key.

    Raises:
        LoadError: One of them can not be read, or is of no use.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as gRPC says nothing of a wrong file, and tries for ever
    path = authorities
    try:
        pems = [read_bytes(path := one, _MOST) if one else None for one in (authorities, key, certificate)]
        path = authorities
        context.load_verify_locations(authorities)
        if certificate is not None:
            context.load_cert_chain(path := certificate, key, password=lambda: "")  # else it asks on the terminal
    except (OSError, ValueError) as problem:  # SSLErrors, too
        why = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or "no PEM"
        fix = "give PEM files: certificates of authorities, or a certificate and its key without a passphrase"
        raise LoadError(f"can not be used: {why}", where=str(path), fix=fix) from None
    return grpc.ssl_channel_credentials(*pems)


class _RenewableContext(ssl.SSLContext):
    """Context that listens for good, and takes each new connection with the one of `now`."""

    now: ssl.SSLContext

    def wrap_bio(self, *args: Any, **named: Any) -> ssl.SSLObject:
        """Begins a connection."""
        return self.now.wrap_bio(*args, **named)


class Certificates:
    """Key and certificate of a server, and whether clients need one, from TensorFlow Serving's SSLConfig.

    Args:
        path: File in protobuf's text format. Its values are PEM, or names of files with it.

    Attributes:
        context: Context for HTTP.

    Raises:
        MsplitError: It can not be read, or its values are of no use.
    """

    what = "certificates"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._verify: bool | None = None
        self.context = _RenewableContext(ssl.PROTOCOL_TLS_SERVER)
        self.read()

    def read(self) -> None:
        """Reads the file, and those that it names, again. New connections get what they hold; where that is wrong, nothing changes.

        Raises:
            LoadError: It is.
        """
        config = parsed(self._path, messages.SSLConfig(), _EXAMPLE, secret=True)
        if not (config.server_key and config.server_cert):
            raise self._wrong("lacks server_key or server_cert", "give both")
        if config.client_verify and not config.custom_ca:
            raise self._wrong("has client_verify and no custom_ca", "give the certificates that sign those of clients")
        if self._verify not in (None, config.client_verify):
            raise self._wrong("changes client_verify, which stays while the server runs", "start it anew")
        try:
            pems = [*map(self._pem, (config.server_key, config.server_cert, config.custom_ca))]
            self._take(pems, config.client_verify)
        except (OSError, EOFError, ValueError) as problem:  # SSLErrors, too; a value is not said: it may be the key
            why = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or "no PEM"
            fix = "give PEM, or names of files in this folder: a key without a passphrase, and its certificate with those above it"
            raise self._wrong(f"key and certificates can not be used: {why}", fix) from None

    def _take(self, pems: Sequence[bytes], verify: bool) -> None:
        """Takes a key, its certificate and those that sign clients'. Raises what `_context` does."""
        key, certificate, authority = pems
        self.context.now = _context(key, certificate, authority, verify)
        self._pems, self._verify = pems, verify
        self._fresh: Any = grpc.ssl_server_certificate_configuration([(key, certificate)], authority or None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled form for a front end, which has what is taken now, whatever the files hold by then."""
        return _as_taken, (self._path, self._pems, self._verify)

    def credentials(self) -> Any:
        """Credentials for gRPC's lower layer. They change with the file."""
        return grpc.dynamic_ssl_server_credentials(self._fresh, self._renewed, bool(self._verify))._credentials

    def _renewed(self) -> Any:
        """Takes what was read since the last connection; None: nothing."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def _wrong(self, what: str, fix: str) -> LoadError:
        return LoadError(what, where=str(self._path), fix=fix)

    def _pem(self, value: str) -> bytes:
        """PEM of a value, which is that, or the name of a file, from the folder of the configuration."""
        if value and _PEM not in value:
            return read_bytes(self._path.parent / value, _MOST)
        return value.encode()


def _as_taken(path: Path, pems: Sequence[bytes], verify: bool) -> Certificates:
    """Certificates that were taken in another process."""
    made = Certificates.__new__(Certificates)
    made._path, made.context = path, _RenewableContext(ssl.PROTOCOL_TLS_SERVER)
    made._take(pems, verify)
    return made


def _context(key: bytes, certificate: bytes, authority: bytes, verify: bool) -> ssl.SSLContext:
    """Context of a server.

    Raises:
        SSLError: Something of it is of no use.
        ValueError: It is no text.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with open(
        os.memfd_create("key"), "wb"
    ) as memory:  # OpenSSL reads files only, and a key is not to be on a disk once more
        memory.write(key + b"\n" + certificate)
        memory.flush()
        made.load_cert_chain(f"/proc/self/fd/{memory.fileno()}", password=lambda: "")  # else it asks on the terminal
    if verify:
        made.load_verify_locations(cadata=authority.decode("ascii"))
        made.verify_mode = ssl.CERT_REQUIRED
    return made
