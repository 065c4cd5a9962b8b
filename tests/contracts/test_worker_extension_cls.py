"""We ship no extension; the example stands for one."""

from __future__ import annotations

from example_plugins import load_example

from hardpoint.testing import check_worker_extension


def test_the_example():
    extension = load_example("worker_extension_cls").AcmeExtension
    assert check_worker_extension(extension, "acme_parameters")["embed_tokens"] > 0
