"""A stage that looks at its scratch folder; importable by ranks."""

from __future__ import annotations

import errno
import stat

from sharmill.engine.stage import Advance
from sharmill.engine.unit import Output, Unit
from sharmill.files.staging import Staging
from support.toy_stage import ToyStage


class WatchedStage(ToyStage):
    """Notes where its units are written, and finds a full disk in unit ``full``, always or ``once``."""

    full = -1
    once = False

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        folder = staging.path(f"first/{unit.index:06d}.txt").parent
        self.mark("written", f"{folder.parent} {stat.S_IMODE(folder.stat().st_mode):o}")
        if unit.index == self.full and not (self.once and self.marked("full")):
            self.mark("full")
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().work(unit, staging, advance)
