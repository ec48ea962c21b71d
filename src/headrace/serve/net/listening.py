"""The way in: the socket, the certificate, and uvicorn as this server runs it.

Owes: a port in use or a file that is no certificate is said before a model is loaded. Does not know: what is served.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from headrace.base.errors import SettingError
from headrace.serve.net.protocol import Protocol11
from headrace.serve.settings import ServeSettings

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed as they reuse it
OWN_FILES = 128  # that the process opens itself: the engine's socket, model files, logs, with room to spare
GRACE_SECONDS = 1  # for connections to close once their responses have ended


class Listening(uvicorn.Server):
    """uvicorn on that socket, without its signal handlers; `ready` is set when it accepts connections."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None, connections: int) -> None:
        """connections: most that are held at once."""
        config = uvicorn.Config(
            app,
            http=partial(Protocol11, most=connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=2048,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.ready.set()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound, not listening yet. SettingError(param="port" or "host") says why it cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingError(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise cannot_listen(host, port, error) from None
    return sock


@contextmanager
def bound_to(settings: ServeSettings) -> Iterator[socket.socket]:
    """The socket that the settings ask for. A dead Unix socket is taken away before, its file at the end."""
    if settings.uds is None:
        with bind(settings.host, settings.port) as sock:
            yield sock
        return
    path = Path(settings.uds)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if path.exists() and not path.is_socket():
            raise SettingError(f"{str(path)!r} is there already, and no socket; choose another --uds", param="uds")
        try:
            if path.is_socket() and sock.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
            sock.bind(str(path))
        except OSError as error:
            raise SettingError(f"cannot listen on {str(path)!r}: {error}", param="uds") from None
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def address(sock: socket.socket, settings: ServeSettings) -> str:
    """Where clients find it: the beginning of a URL, or ``unix:PATH``."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'http' if settings.ssl_certfile is None else 'https'}://{host}:{sock.getsockname()[1]}"


def cannot_listen(host: str, port: int, error: BaseException) -> SettingError:
    """What is to be said of it."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return SettingError(
            f"port {port} on {host} is in use by another program; choose another with --port", param="port"
        )
    return SettingError(f"cannot listen on {host}:{port}: {error}", param="port")


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """For HTTPS, when it is asked for. SettingError names the file that cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None or settings.ssl_ca_certs is not None or settings.ssl_cert_reqs:
            raise SettingError("HTTPS needs a certificate: give --ssl-certfile", param="ssl_certfile")
        return None
    if settings.ssl_cert_reqs and settings.ssl_ca_certs is None:
        raise SettingError("ssl_cert_reqs needs ssl_ca_certs: whose certificates are good", param="ssl_ca_certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    param, used = "ssl_certfile", settings.ssl_certfile
    try:
        # An encrypted key would have the terminal asked; nobody is there.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
        if settings.ssl_ca_certs is not None:
            param, used = "ssl_ca_certs", settings.ssl_ca_certs
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:
        keyless = settings.ssl_keyfile is None and param == "ssl_certfile"
        key = f" with ssl_keyfile {settings.ssl_keyfile!r}" if settings.ssl_keyfile else ""
        hint = "; if its private key is in a file of its own, give --ssl-keyfile" if keyless else ""
        raise SettingError(f"{param} {used!r}{key} cannot be used: {error}{hint}", param=param) from None
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def connections_allowed(most: int) -> int:
    """How many of `most` connections the system allows, once it allows all that it may: each is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    return most if soft == resource.RLIM_INFINITY else max(min(most, soft - OWN_FILES), 1)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
