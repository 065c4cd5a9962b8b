from __future__ import annotations

import pytest

from hardpoint.front_end.observability.console import AggregatedLoggingStatLogger, LoggingStatLogger
from hardpoint.front_end.observability.prometheus_logger import PrometheusStatLogger
from hardpoint.testing import check_stat_logger


@pytest.mark.parametrize("cls", [LoggingStatLogger, AggregatedLoggingStatLogger, PrometheusStatLogger])
def test_built_in_loggers(cls):
    check_stat_logger(cls)
