"""The tuner: measures the engine's settings on the ranks that will train, chooses, and keeps the choice in a file.

``tune`` is given a ``Trial`` (how a model is built from settings, and stepped) and ``Choice``s.
"""

from megatron.core.distributed.fsdp.tuner.choices import engine_choices, without
from megatron.core.distributed.fsdp.tuner.figures import Measured, Settings, Visit
from megatron.core.distributed.fsdp.tuner.ranks import Ranks, TrialProcess, Worker
from megatron.core.distributed.fsdp.tuner.search import Choice, Outcome, Request, Search, choices_in_words
from megatron.core.distributed.fsdp.tuner.trial import Place, Trial, measure
from megatron.core.distributed.fsdp.tuner.tuned_file import Entry, TunedFile
from megatron.core.distributed.fsdp.tuner.tuning import Tuned, engine_facts, tune

__all__ = [
    "Choice",
    "Entry",
    "Measured",
    "Outcome",
    "Place",
    "Ranks",
    "Request",
    "Search",
    "Settings",
    "Trial",
    "TrialProcess",
    "Tuned",
    "TunedFile",
    "Visit",
    "Worker",
    "choices_in_words",
    "engine_choices",
    "engine_facts",
    "measure",
    "tune",
    "without",
]
