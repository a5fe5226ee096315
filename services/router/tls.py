"""TLS of both doors, from files that may be renewed under a running router."""

import logging
import ssl
from pathlib import Path

import grpc

from services.common.errors import ConfigError

_log = logging.getLogger(__name__)


class ServerTls:
    """Owner of what new connections are greeted with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.paths = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._pair = b"", b""
        self._read()

    def reload(self) -> None:
        """When a file has changed. Files that do not go together, yet or at all, change nothing."""
        before = self._pair
        try:
            self._read()
        except ConfigError as error:
            _log.error("certificate not reloaded", extra={"reason": error.message})
        if self._pair != before:
            _log.info("certificate reloaded")

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._grpc_pair(), self._grpc_pair)

    def _grpc_pair(self) -> grpc.ServerCertificateConfiguration:
        """Asked by gRPC for every new connection."""
        certificate, key = self._pair
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _read(self) -> None:
        certificate, key = self.paths
        try:
            pair = certificate.read_bytes(), key.read_bytes()
            # Checks that they are a pair; of use for HTTP from the next handshake on.
            self.context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(
                f"INFINITE_LLM_TLS_CERTIFICATE and _KEY: {certificate}, {key}: {reason}"
            ) from None
        self._pair = pair
