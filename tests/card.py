"""A pretend card: tensors that say they lie elsewhere than the host, while the CPU computes.

What a real card would refuse, or make the host wait for, is seen without one: operators that mix
its tensors with the host's, reads of its values, copies in either direction. Tensors are of the
device ``meta``, which needs no driver, and say that they are CUDA's where they are asked. Ranks are
threads, so that what their kernels and collectives are given can be looked at.

Shape letters: W = ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lrmoe import instances, layer
from lrmoe.cluster.exact import Shared
from lrmoe.exchange import Exchange, Pending, PendingCounts
from lrmoe.kernels import gated
from lrmoe.replicas import Slots
from lrmoe.state import LayerState

CARD = torch.device("meta")
# Operators whose result has a size or a value that the host waits for.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::bincount",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::histc",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class CardTensor(torch.Tensor):
    """A tensor on the card; ``held`` is its memory."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CARD,
        )

    def __init__(self, held):
        self.held = held

    is_cuda = property(lambda self: True)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise AssertionError(f"{function} without the card")


class Card(TorchDispatchMode):
    """Runs what is called inside, and notes what is copied and launched."""

    def __init__(self):
        super().__init__()
        self.uploads = []  # bytes of each copy from the host
        self.reads = []  # operators whose result the host waits for
        self.launches = []  # operators that do something: neither views nor empty tensors
        self.late = []  # copies to the host that nobody waited for, and what they are to hold

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        name = function.name().split(".")[0]
        tensors = [t for t in tree_leaves((arguments, keywords)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if isinstance(t, CardTensor)]
        here = [t for t in tensors if not isinstance(t, CardTensor)]
        is_there = bool(there)
        if keywords.get("device") is not None:
            is_there = torch.device(keywords["device"]) == CARD
            keywords["device"] = torch.device("cpu")
        if name == "aten::_to_copy":
            if here and is_there:
                self.uploads.append(here[0].nbytes)
        else:
            # Numbers of the host may go along; an index may not, it would have to be copied.
            assert not there or all(t.ndim == 0 for t in here), f"{name} mixes host and card"
        is_late = bool(there) and not is_there and keywords.get("non_blocking", False)
        if there and not is_late and (not is_there or _waits(name, arguments, keywords)):
            self.reads.append(name)
        if is_there and not function.is_view and "empty" not in name and name != "aten::detach":
            self.launches.append(name)
        known = {id(t.held): t for t in there}
        arguments, keywords = tree_map(_held, (arguments, keywords))
        result = function(*arguments, **keywords)
        if is_late:
            self.late.append((result, result.clone()))
            result.fill_(-(1 << 40))
        return tree_map(lambda value: _on_card(value, known), result) if is_there else result


def _waits(name, arguments, keywords):
    if name in INDEXING:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in arguments[1])
    if name == "aten::repeat_interleave":
        return keywords.get("output_size") is None
    return name in WAITING


def _held(value):
    return value.held if isinstance(value, CardTensor) else value


def _on_card(value, known):
    """A result; what was written in place is the very tensor that it was."""
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else CardTensor(value)


def put(tensor):
    """A copy on the card."""
    return CardTensor(tensor.detach().clone())


class RankExchange(Exchange):
    """The collectives of ranks that are threads."""

    def __init__(self, shared, rank):
        super().__init__(None)
        self.num_ranks, self.rank = shared.num_ranks, rank
        self.global_rank, self.group_key = rank, 0
        self.keeps_rows = shared.num_ranks == 1
        self._shared = shared

    def start_all_gather_counts(self, counts):
        if self.num_ranks == 1:
            return super().start_all_gather_counts(counts)
        parts = self._shared.swap(self.rank, counts)
        return PendingCounts(torch.stack(parts))

    def all_to_all(self, rows, send_W, receive_W):
        if self.num_ranks == 1:
            return rows
        self._count(rows, send_W)
        parts = self._shared.swap(self.rank, torch.split(rows, list(send_W)))
        received = torch.cat([of_source[self.rank] for of_source in parts])
        assert len(received) == sum(receive_W)
        return received

    def start_all_to_all(self, rows, send_W, receive_W, out=None):
        received = self.all_to_all(rows, send_W, receive_W)
        if out is not None:
            received = out.copy_(received)
        return Pending(received, None, rows)


class _SlotsOfThread(threading.local, Slots):
    """Ranks have slot buffers of their own."""


class _Event:
    """In place of ``torch.cuda.Event``: copies before it are there once it is waited for."""

    def record(self, stream):
        self._late = list(_card().late)

    def synchronize(self):
        _card().reads.append("cudaEventSynchronize")
        for result, values in self._late:
            result.copy_(values)


def _card():
    return torch.utils._python_dispatch._get_current_dispatch_mode()


@contextmanager
def pretended():
    """The parts of PyTorch and of the package that ask for a device are told of the card."""
    with ExitStack() as stack:
        slots, make = _SlotsOfThread(), LayerState.generator
        for target, name, value in (
            (torch, "is_autocast_enabled", lambda *_: False),
            (torch, "autocast", lambda *_, **__: nullcontext()),
            (torch.cuda, "Event", _Event),
            (torch.cuda, "current_stream", lambda _: None),
            (gated, "triton_kernels", lambda _: gated),
            (
                layer,
                "Exchange",
                lambda rank: Exchange(None) if rank is None else RankExchange(*rank),
            ),
            (LayerState, "generator", lambda *a: make(*a[:-1], torch.device("cpu"))),
            (instances, "SLOTS", slots),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(gated._FUSED, {CARD.type: gated._FUSED["cuda"]}))
        yield


def run_threads(run, num_ranks):
    """``run(rank)`` on as many threads, whose first argument for ``group`` it makes."""
    shared = Shared(num_ranks)

    def of_rank(rank):
        try:
            return run((shared, rank))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(of_rank, range(num_ranks)))
