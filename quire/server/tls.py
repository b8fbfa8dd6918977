"""TLS: whether the files of a certificate can be used. Knows `ssl`; uvicorn reads them again to serve."""

import ssl
from pathlib import Path

from quire.errors import ConfigError


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises ConfigError that names the option, for files that are not there or do not belong together."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
        return
    for option, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None:
            _check_readable(option, path)
    try:
        # without a password, OpenSSL would ask the terminal for one
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {certfile} with ssl_keyfile {keyfile or certfile} cannot be used ({error}); they must be "
            "PEM files, belong together, and the key must not be encrypted"
        ) from error


def _check_readable(option: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
