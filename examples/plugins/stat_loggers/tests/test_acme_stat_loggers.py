from pathlib import Path

from acme_stat_loggers import AcmeStatLogger

from hardpoint.testing import check_project, check_stat_logger, tiny_vllm_config
from hardpoint.types.stats import IterationStats

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_stat_loggers": AcmeStatLogger}


def test_it_keeps_the_contract():
    check_stat_logger(AcmeStatLogger)


def test_it_counts(caplog):
    logger = AcmeStatLogger(tiny_vllm_config(served_model_name="m"))
    for _ in range(3):
        logger.record(None, IterationStats(num_generation_tokens=2))
    logger.record(None, None)
    with caplog.at_level("INFO"):
        logger.log()
    assert "acme: m read 0 tokens and wrote 6" in caplog.text
