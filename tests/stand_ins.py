"""Fakes of cuDNN's descriptors, and a real Plan with one, for tests without the library."""

from types import SimpleNamespace

from cases import Case

from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.engines import Candidate
from cupy_sdpa.plans.plan import Plan, SerializedPlan, Target

CASE = Case("plan", dtype="float16", sq=16, stats=False)


class Descriptor:
    """A descriptor that counts calls of close(), which raises ``fail``; finalize() raises ``finalizing``."""

    def __init__(self, kind="EXECUTION_PLAN", fail=None):
        self.kind, self.fail, self.closed, self.pointer = kind, fail, 0, 1
        self.workspace_bytes, self.finalizing = 1000, None

    def close(self):
        self.closed += 1
        if self.fail:
            raise self.fail

    def set(self, *_):
        pass

    def set_handle(self, *_):
        pass

    def finalize(self, *_):
        if self.finalizing:
            raise self.finalizing

    def get(self, name, *_):
        return [self.workspace_bytes]

    def get_text(self, name):
        return '{"engine": {"knobChoices": {}}}'


def uids(graph):
    """A unique id for every tensor."""
    return {tensor.name: number for number, tensor in enumerate(graph.tensors)}


def candidate(descriptor=None, engine=2, knobs=(), workspace_bytes=256):
    """A finalized config."""
    return Candidate(descriptor or Descriptor(), "", engine, knobs, (), workspace_bytes, 1.0)


def fake_plan(descriptor=None, graph=None, **config):
    """A plan; ``plan.library`` must be a fake, too."""
    graph = graph or forward(CASE.problem())
    target = Target("h200", 90, SimpleNamespace(pointer=1, set_stream=lambda stream: None))
    return Plan(SerializedPlan(uids(graph), candidate(descriptor, **config)), graph, target, "key", 1.0)
