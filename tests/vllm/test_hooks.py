"""A vLLM whose calls, fields or caches are not as the adapter knows them: one warning, and vLLM's
own copies from the first step on; an exception would end a worker."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.vllm_stand_in import (
    Engine,
    InputBatch,
    NewRequestData,
    OurState,
    Traffic,
    VllmState,
    cache_groups,
    vllm_config,
)

from hybrid_runtime.integrations.vllm import config, hooks, models
from hybrid_runtime.integrations.vllm.state import AlignedStates

STATES = "vllm.v1.worker.gpu.model_states.mamba_hybrid"
MODEL = models.lazy_name("NemotronHForCausalLM", "0.25.1+cu129")


def release(**methods: Any) -> type[Any]:
    """vLLM's model state of another release; None takes a method away."""
    changed = {k: v for k, v in vars(VllmState).items() if k not in ("__dict__", "__weakref__")}
    present = {name: method for name, method in (changed | methods).items() if method is not None}
    return type("MambaHybridModelState", (), present)


def build() -> Any:
    return getattr(models, MODEL)(vllm_config=vllm_config(), prefix="model")


def chosen() -> type[Any]:
    """The model state that vLLM makes: the one that the model names, or its own."""
    model = build()
    if hasattr(model, "get_model_state_cls"):
        return model.get_model_state_cls()
    return sys.modules[STATES].MambaHybridModelState


def compare(ours: Engine, theirs: Engine) -> None:
    traffic = Traffic(6, [theirs, ours])
    for _ in range(25):
        traffic.step()
        assert torch.equal(ours.memory(), theirs.memory())
        for name in ("_mamba_state_idx_gpu", "num_accepted_tokens_gpu"):
            assert torch.equal(getattr(ours.state, name), getattr(theirs.state, name))


BEFORE, AFTER = VllmState.preprocess_state, VllmState.postprocess_state
ADD, CACHE = VllmState.add_request, VllmState.initialize_kv_cache


class Newer(NamedTuple):
    """A release with one other hook. method: vLLM's own, None: it goes by the name `other`.
    call: how its runner calls it, with what it called the known one with."""

    hook: str
    method: Callable[..., None] | None
    call: Callable[..., None]


NEWER = {
    "one fewer": Newer(
        "preprocess_state",
        lambda self, input_batch, block_tables, num_computed_tokens: BEFORE(
            self, input_batch, block_tables, None, num_computed_tokens
        ),
        lambda state, *known: state.preprocess_state(*known[:2], known[3]),
    ),
    "anything": Newer(
        "preprocess_state",
        lambda self, *args, **kwargs: BEFORE(self, *args),
        lambda state, *known: state.preprocess_state(*known, lane=1),
    ),
    "renamed": Newer("preprocess_state", None, lambda state, *known: state.other(*known)),
    "one more keyword": Newer(
        "postprocess_state",
        lambda self, idx_mapping, num_sampled, num_computed_tokens=None, *, lane=0: AFTER(
            self, idx_mapping, num_sampled, num_computed_tokens
        ),
        lambda state, *known: state.postprocess_state(*known, lane=1),
    ),
    "added by keyword": Newer(
        "add_request",
        lambda self, *, req_index, new_req_data: ADD(self, req_index, new_req_data),
        lambda state, index, data: state.add_request(req_index=index, new_req_data=data),
    ),
    "cache with more": Newer(
        "initialize_kv_cache",
        lambda self, kv_cache_config, block_tables, lane=0: CACHE(
            self, kv_cache_config, block_tables
        ),
        lambda state, *known: state.initialize_kv_cache(*known, lane=1),
    ),
}


@pytest.mark.parametrize("newer", NEWER.values(), ids=NEWER)
def test_a_call_that_is_not_known_is_left_to_vllm(
    newer: Newer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def call(state: Any, hook: str, *known: Any) -> None:
        if hook == newer.hook:
            newer.call(state, *known)
        else:
            getattr(state, hook)(*known)

    renamed = {} if newer.method else {"other": getattr(VllmState, newer.hook)}
    own = release(**{newer.hook: newer.method}, **renamed)
    monkeypatch.setattr(sys.modules[STATES], "MambaHybridModelState", own)
    for _ in range(2):
        kind = chosen()
    theirs, ours = Engine(own, call=call), Engine(kind, call=call)
    compare(ours, theirs)
    assert ours.state.full_launches == theirs.state.full_launches > 15
    (record,) = caplog.records
    assert newer.hook in record.getMessage()
    assert "0.25.1+cu129" in record.getMessage()


def test_the_known_calls_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.SWITCH, "columns")
    theirs, ours = Engine(VllmState), Engine(chosen())
    compare(ours, theirs)
    assert isinstance(ours.state, AlignedStates)
    assert ours.state.statistics()["steps"] == theirs.state.full_launches > 15
    assert ours.state.full_launches == 0


def context_on_first_use(
    self: Any, kv_cache_config: Any, mamba_group_ids: Any, block_tables: Any
) -> str:
    return "made"


def test_one_way_to_make_the_copy_context() -> None:
    assert hooks.unknown_method(release()) is None
    older = release(_ensure_align_ctx=context_on_first_use, initialize_kv_cache=None)
    assert hooks.unknown_method(older) is None
    for changed in ({"_ensure_align_ctx": context_on_first_use}, {"initialize_kv_cache": None}):
        assert "not one of" in (hooks.unknown_method(release(**changed)) or "")


@pytest.mark.parametrize("handed", [InputBatch, NewRequestData])
def test_every_field_that_is_read_must_be_there(
    handed: type[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = handed.__name__
    (module,) = [m for path, m in sys.modules.items() if path[:7] == "vllm.v1" and hasattr(m, name)]
    known = hooks.FIELDS[name].split()
    for lost in known:
        rest = [(f.name, Any) for f in dataclasses.fields(handed) if f.name != lost]
        monkeypatch.setattr(module, name, dataclasses.make_dataclass(name, rest))
        assert chosen() is VllmState
        assert f"no {lost}." in caplog.records[-1].getMessage()
    assert len(caplog.records) == len(known)


def test_a_renamed_module_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, STATES, None)
    assert not hasattr(build(), "get_model_state_cls")
    assert "mamba_hybrid" in caplog.text


def test_a_configuration_without_a_known_setting_is_left_to_vllm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = vllm_config()
    del settings.kv_transfer_config
    for given in ({"vllm_config": settings}, {"vllm_config": None}):
        model = getattr(models, MODEL)(**given, prefix="model")
        assert not hasattr(model, "get_model_state_cls")
    setting, argument = (record.getMessage() for record in caplog.records)
    assert "attribute 'kv_transfer_config'" in setting
    assert "without vllm_config" in argument


def test_a_cache_that_cannot_be_read_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    ours.groups = cache_groups()
    ours.groups.kv_cache_groups[1].layer_names = ["layer of another name"]
    compare(ours, theirs)
    assert ours.state.full_launches == theirs.state.full_launches > 15
    (record,) = caplog.records
    assert "layer of another name" in record.getMessage()
