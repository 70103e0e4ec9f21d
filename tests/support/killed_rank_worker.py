"""Trains the toy recipe under torchrun. At the first attempt the second rank is killed in the update of step 2."""

import os
import signal
import sys
from pathlib import Path

from alula.config.load import load_config
from alula.trainer.trainer import Trainer
from rank_keys_worker import COMMON, RECIPE

if __name__ == "__main__":
    settings = [*COMMON, "checkpoint.every=1", f"out={Path(sys.argv[1]) / 'groups'}"]
    trainer = Trainer(load_config(RECIPE, settings), resume="auto")
    update = trainer.updater.update

    def killed(*arguments):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert first or trainer.logger.resumed_from == 1
        if first and trainer.world.rank == 1 and trainer.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(*arguments)

    trainer.updater.update = killed
    trainer.run()
