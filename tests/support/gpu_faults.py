"""Stages on GPUs that break, for tests on machines without one; importable by ranks. They raise what torch raises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sharmill.engine.stage import Advance, Processor
from sharmill.engine.unit import Output, Unit
from sharmill.files.host import usable_cores
from sharmill.files.staging import Staging
from sharmill.models.memory import MemoryGuard
from support.toy_stage import GpuStage, ToyStage, output_bytes, run, wait_until

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
ECC = "CUDA error: uncorrectable ECC error encountered"

# Of this process, as a CUDA context is.
broken: list[str] = []


class BreakingStage(GpuStage):
    """Breaks the context of its process at some units; nothing works in that process from then on.

    Args:
        once: units that do so at their first attempt, as an error of the machine does.
        always: units whose data do so at every attempt.
    """

    def __init__(self, folder: Path, *, once: tuple[int, ...] = (), always: tuple[int, ...] = (), **options: Any):
        super().__init__(folder, **options)
        self.once, self.always = once, always
        self.resource = "gpu"  # type: ignore[misc]

    def error(self, message: str) -> Exception:
        """As of the versions of torch before 2.9, which have no error of their own for it."""
        return RuntimeError(message)

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index in self.always or (unit.index in self.once and not self.marked(f"broke-{unit.index}")):
            self.mark(f"broke-{unit.index}")
            broken.append(ASSERT)
        if broken:
            self.mark("attempts", f"{unit.index} {os.getpid()}")
            raise self.error(broken[0])
        return super().work(unit, staging, advance)


class FaultyStage(BreakingStage):
    """Meets every fault of a GPU once: three lacks of memory, a broken context, a hang, and a dead GPU at set-up.

    The last unit has none. ``faults`` leaves some out.
    """

    def __init__(self, folder: Path, *, faults: tuple[int, ...] = (0, 1, 2, 3, 4), dead: bool = True):
        super().__init__(folder, units=6, once=(3,) if 3 in faults else ())
        self.behaviour = {index: does for index, does in _FAULTS.items() if index in faults}
        if dead:
            self.setup_does = "device_once"
        if 4 in faults:
            self.unit_time_limit = 3.0

    def error(self, message: str) -> Exception:
        import torch

        return torch.AcceleratorError(message)

    def assert_done(self, folder: Path) -> None:
        """Each fault cost its unit one attempt and no other unit any, and the output has the bytes of one without."""
        faulty = {*self.behaviour, *self.once}
        assert self.attempts() == {index: 1 + (index in faulty) for index in range(6)}
        clean = ToyStage(folder)
        run(clean)
        assert output_bytes(self) == output_bytes(clean)


_FAULTS = {0: "cuda_memory_once", 1: "no_engine_once", 2: "cufft_once", 4: "hold_gil_once"}


class FullStage(GpuStage):
    """Its batches never fit into the memory of the device, as those of a stage with too large ``batch_seconds``."""

    def open(self, device: str) -> Processor:
        self.guard = MemoryGuard("the codec", "encode.batch_seconds")
        return super().open(device)

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        import torch

        self.mark("attempts", f"{unit.index} {os.getpid()}")
        with self.guard.batch(30.0, 6):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 19.00 GiB.")


# Of the error that ends such a stage.
FULL = (
    "the codec: a batch of 6 rows and 30 s does not fit in the memory of the device: lower encode.batch_seconds below"
)


class AssertingStage(GpuStage):
    """Does what makes a real GPU fail with a device-side assert, at the units ``always``."""

    def __init__(self, folder: Path, *, always: tuple[int, ...], **options: Any):
        super().__init__(folder, **options)
        self.always = always

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        import torch

        table = torch.zeros(4, device="cuda")
        index = torch.tensor([9 if unit.index in self.always else 3], device="cuda")
        table[index].sum().item()
        return super().work(unit, staging, advance)


class LookingAhead(GpuStage):
    """Notes for each unit the one that its rank is told to expect behind it, and how many cores the rank has."""

    looks_ahead = True

    def open(self, device: str) -> Processor:
        processor = super().open(device)
        self.mark("cores", str(usable_cores()))
        processor.expect = lambda unit: self.mark("expected", "none" if unit is None else str(unit.index))
        return processor


class KindStage(GpuStage):
    """Its ranks say that their device is of the kind ``kinds`` has for what CUDA_VISIBLE_DEVICES names."""

    def __init__(self, folder: Path, *, kinds: dict[str, str], **options: Any):
        super().__init__(folder, **options)
        self.kinds = kinds

    def open(self, device: str) -> Processor:
        processor = super().open(device)
        processor.device_kind = self.kinds[os.environ["CUDA_VISIBLE_DEVICES"]]
        return processor


class BadDevices(GpuStage):
    """Cannot be set up where CUDA_VISIBLE_DEVICES names one of ``bad``; other ranks wait until those were tried."""

    def __init__(self, folder: Path, *, bad: tuple[str, ...], tries: int = 3, **options: Any):
        super().__init__(folder, **options)
        self.bad, self.tries = bad, tries

    def load(self, device: str) -> None:
        super().load(device)
        if os.environ["CUDA_VISIBLE_DEVICES"] in self.bad:
            self.mark("bad", os.environ["CUDA_VISIBLE_DEVICES"])
            raise RuntimeError(ECC)

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        wait_until(lambda: len(self.marked("bad")) >= self.tries * len(self.bad))
        return super().work(unit, staging, advance)
