from __future__ import annotations

from argparse import Namespace

import pytest

from hardpoint.errors import ConfigError
from hardpoint.processes.http_server import check_tls


def flags(**given):
    return Namespace(ssl_keyfile=None, ssl_certfile=None, **given)


def test_without_tls_flags_there_is_nothing_to_check():
    check_tls(flags())


@pytest.mark.parametrize("content", [None, "", "not a certificate"])
def test_files_that_cannot_be_used_are_found_before_the_model_is_loaded(tmp_path, content):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    if content is not None:
        key.write_text(content)
        certificate.write_text(content)
    with pytest.raises(ConfigError, match="TLS files"):
        check_tls(Namespace(ssl_keyfile=str(key), ssl_certfile=str(certificate)))
    with pytest.raises(ConfigError, match="TLS files"):
        check_tls(Namespace(ssl_keyfile=str(key), ssl_certfile=None))
