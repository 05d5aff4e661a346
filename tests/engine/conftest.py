"""Tiny models of each architecture, built and loaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from trimtab import tiny
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_learner import TorchLearner

VOCAB, CONTEXT, WINDOW = 300, 64, 4


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture -> folder; Gemma's sliding window is shorter than most test sequences."""

    @cache
    def build(architecture: str) -> Path:
        return tiny.build(
            tmp_path_factory.mktemp(architecture),
            architecture=architecture,
            vocab_size=VOCAB,
            context=CONTEXT,
            sliding_window=WINDOW,
        )

    return build


@pytest.fixture(scope="session")
def base_of(folder_of: Callable[[str], Path]) -> Callable[[str], BaseModel]:
    """architecture -> float32 base model, named after it."""

    @cache
    def load(architecture: str) -> BaseModel:
        return BaseModel.load(
            architecture,
            folder_of(architecture),
            learner_dtype="float32",
            sampler_dtype="float32",
        )

    return load


@pytest.fixture(params=tiny.ARCHITECTURES)
def base(request: pytest.FixtureRequest, base_of: Callable[[str], BaseModel]) -> BaseModel:
    return base_of(request.param)


@pytest.fixture
def llama(base_of: Callable[[str], BaseModel]) -> BaseModel:
    return base_of("llama")


@pytest.fixture
def learner(llama: BaseModel) -> TorchLearner:
    """A learner on the Llama shape; 16 rows a micro-batch, so that requests are cut."""
    return TorchLearner(llama, micro_batch_tokens=16)
