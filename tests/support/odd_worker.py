"""A rollout worker that hangs, dies or raises."""

import os
import time

from alula.errors import SettingError


class OddWorker:
    def __init__(self, what):
        self.what = what

    def start(self):
        if self.what == "dies at the start":
            os._exit(1)

    def work(self, orders):
        if self.what == "hangs":
            time.sleep(3600)
        if self.what == "dies":
            os._exit(1)
        raise SettingError("prompts: too long.")
