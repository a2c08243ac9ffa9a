"""A rank of a run in which one rank is killed: ``DIE_AT`` is ``rank:save|step:step``."""

import os
import signal

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import TrainerCallback

from lrmoe.training import checkpoint, trainer, worker

rank, where, step = os.environ["DIE_AT"].split(":")
is_mine = os.environ["RANK"] == rank


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DieAtStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(step):
            die()


if is_mine and where == "step":
    before = trainer.MoETrainer.__init__

    def init(self, **kwargs):
        before(self, **kwargs)
        self.add_callback(DieAtStep())

    trainer.MoETrainer.__init__ = init

if is_mine and where == "save":
    flush = checkpoint._force_to_disk

    def flush_or_die(path):
        # Everything is written and nothing is renamed: the last moment of an unfinished one.
        if path.name.endswith(f"step-{int(step):08d}"):
            die()
        flush(path)

    checkpoint._force_to_disk = flush_or_die

if __name__ == "__main__":
    record(worker.main)()
