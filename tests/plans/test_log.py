"""The loggers: plans that are built, loaded and refused, and cuDNN's own log."""

import logging

import numpy as np
import pytest
from fake_cupy import library
from functions import refused
from planner import plan_problem

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, get_plan_cache, store


def test_plans_are_logged(fake, caplog):
    """Built, loaded from disk, refused by cuDNN and by the support table: each with its time and the problem."""
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    get_plan_cache().clear()
    store.kept().clear()
    with caplog.at_level(logging.INFO, logger="cupy_sdpa"):
        for _ in range(3):  # only the first builds a plan
            attention(x, x, x)
        get_plan_cache().clear()
        attention(x, x, x)
        with refused(), pytest.raises(Unsupported):
            attention(x, x, x, causal=True)
        with pytest.raises(Unsupported):
            attention(x, x, x, return_stats="max_sumexp", sinks=fake.zeros(2, np.float32))
    built, loaded, by_cudnn, by_table = [record.getMessage() for record in caplog.records]
    assert built.startswith("built in ")
    assert loaded.startswith("loaded from the disk cache in ")
    assert "engine 2 for forward attention, float16" in built
    assert by_cudnn.startswith("refused in ")
    assert "causal from the top left" in by_cudnn
    assert "has no engine" in by_cudnn
    assert "not supported with sinks" in by_table
    assert all(record.name == "cupy_sdpa" and record.levelno == logging.INFO for record in caplog.records)


def test_cudnn_is_asked_for_messages_on_request_only(fake):
    """If the logger has a level of its own; a change takes effect with the next plan."""
    x, logger = fake.ones((16, 2, 20, 1), np.float16, order="F"), logging.getLogger("cupy_sdpa.cudnn")
    for level in (
        logging.NOTSET,
        logging.WARNING,
        logging.WARNING,
        logging.DEBUG,
        logging.ERROR,
        logging.NOTSET,
        logging.NOTSET,
    ):
        logger.setLevel(level)
        get_plan_cache().clear()
        attention(x, x, x)
    assert library().log_masks == [0b0110, 0b1110, 0b0010, 0]


def messages(problem, gpu, level):
    """In a child: the records of cuDNN's log while a problem is planned."""
    records = []
    handler, logger = logging.Handler(), logging.getLogger("cupy_sdpa.cudnn")
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level)
    outcome = plan_problem(problem, gpu)
    logger.setLevel(logging.NOTSET)
    again = plan_problem(problem, gpu)
    count = len(records)
    plan_problem(problem, gpu)
    logger.removeHandler(handler)
    return records[:count], str(outcome) == str(again), len(records) - count


@pytest.mark.cudnn
def test_the_log_of_cudnn(planner):
    """Without a GPU: the reasons of refused engines as warnings, and every call at DEBUG; nothing without a level."""
    shape = (12, 4, 64, 2)
    problem = cupy_sdpa.problem(shape, shape, shape, dtype="float16")
    records, same, later = planner.call(messages, problem, "h200", logging.WARNING)
    assert same
    assert not later
    assert {level for level, _ in records} == {"WARNING"}
    assert any("not a multiple of 8" in text for _, text in records)
    assert not any("Process=" in text for _, text in records)
    records, _, later = planner.call(messages, problem, "h200", logging.DEBUG)
    assert {level for level, _ in records} == {"WARNING", "DEBUG"}
    assert any("cudnnBackendFinalize() called" in text for _, text in records)
    assert not later
