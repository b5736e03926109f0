"""Rollout function that never returns: keeps router and engines up so that something else can use them.

    --rollout-function-path slime.rollout.sleep_rollout.sleep --debug-rollout-only

End the run with a signal.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

_INTERVAL_S = 3600.0


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Blocks for ever."""
    logger.info("rollout %d sleeps; the engines stay up until the run is stopped", rollout_id)
    while True:
        time.sleep(_INTERVAL_S)
