"""A twin of the stream of copies: on a CPU they happen at once, and no missing wait would show.

`Recorder` keeps a vector clock for the computation (stream 0) and for copies (stream 1), notes
which numbers every PyTorch operation reads and writes, and reports two operations on the same
number, one of them a write, that no chain of events puts in order. All memory is the computation's,
which has it again as soon as it is freed: that counts as a write.
"""

import contextlib
import weakref
from collections import Counter
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """A stream of copies, and a record of who touched which numbers when."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = [[0, 0], [0, 0]]  # the latest operations of both that each stream knows of
        self.stream = 0
        self.times: dict[int, torch.Tensor] = {}  # by address: when each stream last read, wrote
        self.shared = set[int]()
        self.num_copied = Counter[int]()  # bytes that copies have read, by address
        self.num_ordered = 0  # operations after one of the other stream on the same numbers
        self.num_freed_early = 0

    @contextlib.contextmanager
    def copying(self):
        self.clocks[1] = [*map(max, *self.clocks)]
        self.stream = 1
        yield
        self.stream = 0

    def event(self) -> SimpleNamespace:
        known = [0, 0]

        def record() -> None:
            known[:] = self.clocks[self.stream]

        def wait() -> None:
            self.clocks[self.stream] = [*map(max, known, self.clocks[self.stream])]

        return SimpleNamespace(record=record, wait=wait)

    def share(self, tensor: torch.Tensor) -> None:
        self.shared.add(tensor.untyped_storage().data_ptr())

    def synchronize(self, _device: object = None) -> None:
        self.clocks = [[*map(max, *self.clocks)] for _ in range(2)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.clocks[self.stream][self.stream] += 1
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            is_write = schema.alias_info is not None and schema.alias_info.is_write
            for tensor in tree_leaves(argument):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and not func.is_view:
                    self._touch(tensor, is_write=is_write)
        return func(*args, **(kwargs or {}))

    def _touch(self, tensor: torch.Tensor, *, is_write: bool) -> None:
        memory = tensor.untyped_storage()
        place, N = memory.data_ptr(), memory.nbytes() // tensor.element_size()
        if self.stream == 1:
            assert tensor.is_contiguous()
            self.num_copied[place] += tensor.nbytes * (not is_write)
            if place not in self.times:
                self.times[place] = torch.zeros(2, 2, N, dtype=torch.int64)
                weakref.finalize(memory, self._free, place)
        elif place not in self.times:
            return
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        numbers = torch.arange(N).as_strided(*layout).flatten()
        clock = self.clocks[self.stream]
        for stream, known in enumerate(clock):
            latest = self.times[place][stream, 0 if is_write else 1 :, numbers].max()
            assert latest <= known, "both streams use the same numbers"
            self.num_ordered += int(latest > 0 and stream != self.stream)
        self.times[place][self.stream, int(is_write), numbers] = clock[self.stream]

    def _free(self, place: int) -> None:
        is_used = self.times.pop(place)[1].max() > self.clocks[0][1]
        self.num_freed_early += int(is_used and place not in self.shared)
        self.shared.discard(place)
