"""One rank of a run that :mod:`lrmoe.training.launch` started."""

from __future__ import annotations

import json
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from lrmoe.training.job import run
from lrmoe.training.settings import TrainSettings


@record
def main() -> None:
    """Trains with the settings given as one JSON argument."""
    run(TrainSettings.from_dict(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
