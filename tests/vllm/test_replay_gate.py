"""Which configurations replay: decided once, when the model is built, with one warning if not."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.vllm_stand_in import K, VllmState, vllm_config

from hybrid_runtime.integrations.vllm import config, hooks, models, replay_layers
from hybrid_runtime.integrations.vllm.replay_state import ReplayStates
from hybrid_runtime.integrations.vllm.state import AlignedStates

QWEN = "Qwen3NextForCausalLM"
MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch, vllm: ModuleType) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.27.1")


def build(architecture: str = "NemotronHForCausalLM", **change: Any) -> Any:
    kind = getattr(models, models.lazy_name(architecture, "0.25.1+cu129"))
    return kind(vllm_config=vllm_config(**change), prefix="model")


def spare_blocks(model: Any) -> list[int]:
    return [layer.get_kv_cache_spec(None).num_speculative_blocks for layer in model.mixers]


@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_model_that_replays(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        model = build(cache_config__mamba_cache_mode=mode)
    assert spare_blocks(model) == [0, 0]
    assert issubclass(model.get_model_state_cls(), ReplayStates)
    assert issubclass(model.get_model_state_cls(), VllmState)
    assert model.replay_layers.layers == list(model.mixers)
    assert model.replay_layers.drafts == K
    assert not caplog.records
    # A rate of -2 is exp(ln 2); weights that are loaded anew are followed.
    model.load_weights(-2.0)
    assert model.replay_layers.params[0].exp().allclose(-model.mixers[0].A)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_speculative_tokens": 16}, "16 drafts"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__enable_dbo": True}, "overlap"),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "draft model"),
        (
            {"mamba_config": SimpleNamespace(backend=SimpleNamespace(name="CPU"))},
            "CPU (--mamba-backend triton replays)",
        ),
        ({"cache_config__use_replayssm": True}, "use-replayssm"),
    ],
)
def test_what_keeps_vllms_layout(
    change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With our copies."""
    for _ in range(2):
        model = build(**change)
    assert spare_blocks(model) == [K, K]
    assert issubclass(model.get_model_state_cls(), AlignedStates)
    assert not issubclass(model.get_model_state_cls(), ReplayStates)
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "does not replay" in record.getMessage()


def test_the_flags_of_published_recipes_replay(caplog: pytest.LogCaptureFixture) -> None:
    """FlashInfer's backend, which is asked for decode rows only, and stochastic rounding."""
    flags = {"backend": SimpleNamespace(name="FLASHINFER"), "enable_stochastic_rounding": True}
    with caplog.at_level("WARNING"):
        model = build(mamba_config=SimpleNamespace(**flags))
    assert spare_blocks(model) == [0, 0]
    assert not caplog.records
    layers = model.replay_layers
    assert [layers.rounding(index).layer for index in (0, 1)] == [0, 1]
    assert len(set(layers.rounding(0).seed.tolist())) == len(layers.rows.whole.slot)
    assert build().replay_layers.rounding(0) is None


def test_with_tensor_parallelism(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        model = build(parallel_config__tensor_parallel_size=2)
    assert spare_blocks(model) == [0, 0]
    assert not caplog.records


def test_without_drafts_the_log_says_what_gives_them(caplog: pytest.LogCaptureFixture) -> None:
    """For information: a warning is for drafts that do not replay."""
    with caplog.at_level("INFO"):
        model = build(num_speculative_tokens=0)
    assert spare_blocks(model) == [K, K]
    assert not issubclass(model.get_model_state_cls(), ReplayStates)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "does not replay" in record.getMessage()
    assert "--speculative-config" in record.getMessage()


@pytest.mark.parametrize(("name", "kind"), [("vllm", "NemotronHForCausalLM"), ("qwen", QWEN)])
def test_the_page_quotes_the_line_that_proves_replay(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        build(kind)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    page = (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text()
    quoted = re.findall(r"^hybrid-runtime replays: .*$", page, re.MULTILINE)
    without_numbers = [re.sub(r"[\d.]+ ", "N ", line) for line in (record.getMessage(), *quoted)]
    assert len(without_numbers) == 2
    assert without_numbers[0] == without_numbers[1]


@pytest.mark.parametrize(("size", "why"), [(256, "256 columns"), (8, "differ in size")])
def test_layers_of_another_size(
    size: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = sys.modules[MIXER].MambaMixer2
    own = kind.__init__

    def built(self: Any, prefix: str = "") -> None:
        own(self, prefix)
        self.ssm_state_size = size if size > 128 or prefix == "l1" else 4

    monkeypatch.setattr(kind, "__init__", built)
    model = build()
    assert spare_blocks(model) == [K, K]
    assert not hasattr(model, "replay_layers")
    (record,) = caplog.records
    assert why in record.getMessage()


@pytest.mark.parametrize("value", ["VLLM_BATCH_INVARIANT", "VLLM_USE_HW_AGNOSTIC"])
def test_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(value, "1")
    assert spare_blocks(build()) == [K, K]


@pytest.mark.parametrize("which", ["platform", "method", "field", "other"])
def test_another_vllm(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if which == "platform":
        platform = sys.modules["vllm.platforms"].current_platform
        monkeypatch.setattr(platform, "is_cuda", lambda: False)
    elif which == "method":
        kind = sys.modules[MIXER].MambaMixer2
        monkeypatch.setattr(kind, "conv_ssm_forward", lambda self, states, output, lane: None)
    elif which == "field":
        module = sys.modules["vllm.v1.attention.backends.mamba2_attn"]
        monkeypatch.delitem(module.Mamba2AttentionMetadata.__dataclass_fields__, "num_decodes")
    else:
        replaced = sys.modules["vllm.model_executor.custom_op"].op_registry_oot
        replaced["MambaMixer2"] = type("Another", (sys.modules[MIXER].MambaMixer2,), {})
    assert spare_blocks(build()) == [K, K]
    (record,) = caplog.records
    says = {"platform": "NVIDIA", "method": "lane", "field": "num_decodes", "other": "another"}
    assert says[which] in record.getMessage()


@pytest.mark.parametrize("mode", ["align", "none"])
def test_gated_delta_net(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        model = build(QWEN, cache_config__mamba_cache_mode=mode)
    assert spare_blocks(model) == [0, 0]
    assert issubclass(model.get_model_state_cls(), ReplayStates)
    (record,) = caplog.records
    assert "replays: one state per request in 2 layers" in record.getMessage()
    model.load_weights(None)
    assert model.replay_layers.params == ()
    # Of 28 and later, where it would take a state for every draft.
    assert not model.mixers[0]._can_use_fused_gdn_mtp_decode(None)


def another_argument(
    self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, lane: Any
) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"_forward_core": another_argument}, "lane"),
        ({"_forward_core_by_another_way": another_argument}, "_forward_core_by_another_way"),
        # It came with a method that asks whether to bypass `_forward_core`.
        ({"_forward_core_fused_norm": another_argument}, "_can_use_fused_gdn_mtp_decode"),
    ],
)
def test_another_gated_delta_net(
    change: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = sys.modules[hooks.GDN.module].QwenGatedDeltaNetAttention
    for name, method in change.items():
        monkeypatch.setattr(kind, name, method, raising=False)
    for _ in range(2):
        assert spare_blocks(build(QWEN)) == [K, K]
    (record,) = caplog.records
    assert says in record.getMessage()
    assert spare_blocks(build()) == [0, 0]


def test_another_metadata_of_gated_delta_net(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = sys.modules[hooks.GDN.metadata[0]].GDNAttentionMetadata
    monkeypatch.delitem(known.__dataclass_fields__, "spec_token_indx")
    assert spare_blocks(build(QWEN)) == [K, K]
    (record,) = caplog.records
    assert "spec_token_indx" in record.getMessage()


def test_larger_heads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kind = sys.modules[hooks.GDN.module].QwenGatedDeltaNetAttention
    own = kind.__init__

    def built(self: Any, prefix: str = "") -> None:
        own(self, prefix)
        self.head_v_dim = 256

    monkeypatch.setattr(kind, "__init__", built)
    assert spare_blocks(build(QWEN)) == [K, K]
    (record,) = caplog.records
    assert "4 x 256" in record.getMessage()


def test_states_of_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    model = build("JambaForCausalLM")
    assert not issubclass(model.get_model_state_cls(), ReplayStates)
    (record,) = caplog.records
    assert "neither Mamba-2's nor Gated DeltaNet's" in record.getMessage()


def test_a_model_within_a_model() -> None:
    """A model of text inside one of pictures: the records belong to the outer one."""
    with replay_layers.collecting(True) as layers:
        inner = build()
    assert [layer.prefix for layer in layers] == ["l0", "l1"]
    assert not hasattr(inner, "replay_layers")


def test_columns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Layers that were registered for a model that replays are vLLM's in one that does not."""
    build()
    monkeypatch.setenv(config.SWITCH, "columns")
    for change in ({}, {"num_speculative_tokens": 16}):
        assert spare_blocks(build(**change)) == [K, K]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
