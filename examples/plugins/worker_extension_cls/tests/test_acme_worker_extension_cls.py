from acme_worker_extension_cls import AcmeExtension

from hardpoint.testing import check_worker_extension


def test_it_keeps_the_contract_and_answers():
    counts = check_worker_extension(AcmeExtension, "acme_parameters")
    assert counts["embed_tokens"] == 448 * 64
