"""FSDP2 and DDP of quantized models, on two processes: QLoRA, state dicts, saving and resuming."""

from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model, load_fsdp_model, save_fsdp_model
from adapters import assert_same_state, relative
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from hf_kbit.nn.weight import local

WAYS = ("planes", "tiles", "accelerate", "accelerate, tiles")
STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")  # of accelerate's checkpoints, by default the first
QUANTIZED = ("qwen3_moe", "half", "tied", "gpt_oss", "llama4")  # while they load


def shard(model):
    """By layers, as a loop of one's own does."""
    mesh = init_device_mesh("cpu", (ranks.SIZE,))
    for layer in (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accelerator(rank, state_dicts="SHARDED_STATE_DICT"):
    """What accelerate's functions ask of an ``Accelerator`` with FSDP2: on CPUs it makes none."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        state_dict_type=state_dicts,
    )
    PartialState(cpu=True)  # accelerate does not log without
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("all",): init_device_mesh("cpu", (ranks.SIZE,))},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["all"]),
        is_fsdp2=True,
        is_main_process=rank == 0,
        process_index=rank,
        num_processes=ranks.SIZE,
        wait_for_everyone=dist.barrier,
        mixed_precision="no",
        device=torch.device("cpu"),
    )


def shard_by_accelerate(model, rank):
    """What ``Accelerator.prepare`` does."""
    return fsdp2_prepare_model(accelerator(rank), model)


def through_checkpoint(model, other, rank, state_dicts, folder):
    """``other`` with the adapters of ``model``, as ``Accelerator.save_state`` and ``load_state`` bring them there."""
    ours = accelerator(rank, state_dicts)
    place = ours.state.fsdp_plugin, ours
    save_fsdp_model(*place, model, folder, adapter_only=True)
    load_fsdp_model(*place, other, folder, adapter_only=True)
    return other


def without_adapters(model):
    """The model with adapters that are all zeros."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    return model


def whole_state(model) -> dict[str, torch.Tensor]:
    """Of all that is no adapter, in the first process; none in the other."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor for name, tensor in state.items() if "lora" not in name}


def in_each_process(rank, folder):
    found, ids = {}, ranks.part_of_batch(rank)
    for way in WAYS:
        with ranks.where_tiles_are_read("tiles" in way):
            model = ranks.adapt(ranks.load(folder / "qwen3_moe"))
            model = shard_by_accelerate(model, rank) if "accelerate" in way else shard(model)
            found[way] = {
                "tiled": {local(layer.weight).is_tiled for layer in ranks.quantized_layers(model)},
                "sharded": {parts[:2] for parts in ranks.sizes(model).values()},
                "losses": ranks.trained(model, ids),
                "state": whole_state(model),
            }
            model.save_pretrained(folder / f"{way}{rank}")
    for form in ("planes", "tiles"):
        whole = ranks.adapt(ranks.load(folder / "qwen3_moe"))
        whole = ranks.as_on_a_gpu(whole) if form == "tiles" else whole
        found[f"ddp, {form}"] = {"losses": ranks.trained(DistributedDataParallel(whole), ids)}
        whole.save_pretrained(folder / f"ddp, {form}{rank}")
    for state_dicts in STATE_DICTS:  # of the model that was trained last, which accelerate has sharded
        other = shard_by_accelerate(without_adapters(ranks.adapt(ranks.load(folder / "qwen3_moe"))), rank)
        other = through_checkpoint(model, other, rank, state_dicts, folder / state_dicts)
        other.save_pretrained(folder / f"{state_dicts}{rank}")
    model = PeftModel.from_pretrained(ranks.load(folder / "qwen3_moe"), folder / f"planes{rank}", is_trainable=True)
    found["resumed"] = ranks.trained(shard(model.train()), ids)
    with ranks.where_tiles_are_read():
        shard(ranks.load(folder / "qwen3_moe")).save_pretrained(folder / "by hand")
    model = ranks.load(folder / "qwen3_moe", distributed_config=DistributedConfig(fsdp_size=ranks.SIZE))
    model.save_pretrained(folder / "by Transformers")
    found["loaded"] = ranks.logits(model)["logits"]
    plan = DistributedConfig(fsdp_size=ranks.SIZE)
    ranks.load(folder / "tied", distributed_config=plan).save_pretrained(folder / "tied" / "by Transformers")
    for name in QUANTIZED:
        dense = folder / name / "dense"
        model = ranks.load(dense, distributed_config=plan, quantization_config=ranks.config(name))
        found[name, "sizes"], found[name, "kept"] = ranks.sizes(model), ranks.kept_besides(model)
        model.save_pretrained(folder / name / "quantized")
        found[name] = ranks.logits(model)["logits"]
    return found


def checkpoints(folder):
    for name in QUANTIZED:
        ranks.save_quantized(name, folder)


@pytest.fixture(scope="module")
def alone(folder, found):
    """What one process makes of the whole batch, and of the adapters that two have trained."""
    model = ranks.adapt(ranks.load(folder / "qwen3_moe"))
    state = model.state_dict(keep_vars=True)  # packed weights as one value each, as sharded ones are
    state = {name: tensor for name, tensor in state.items() if "lora" not in name}
    losses = ranks.trained(model, ranks.BATCH)
    model.save_pretrained(folder / "alone")
    model = PeftModel.from_pretrained(ranks.load(folder / "qwen3_moe"), folder / "planes0", is_trainable=True)
    return {"losses": losses, "state": state, "resumed": ranks.trained(model.train(), ranks.BATCH)}


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(losses).mean(0)


@pytest.mark.parametrize("way", (*WAYS, "ddp, planes", "ddp, tiles"))
def test_training_is_that_of_one_process(found, alone, folder, way):
    """Under DDP every process has a gradient for all adapters, also on experts that none of its tokens is sent to."""
    torch.testing.assert_close(mean([process[way]["losses"] for process in found]), alone["losses"])
    for rank in range(ranks.SIZE):
        ranks.assert_close_adapters(
            ranks.saved_adapters(folder / f"{way}{rank}"), ranks.saved_adapters(folder / "alone")
        )


@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_are_sharded_and_stay_what_they_are(found, alone, way):
    for process in found:
        assert process[way]["sharded"] == {(ranks.SIZE, ranks.SIZE)}
        assert process[way]["tiled"] == {"tiles" in way}
    assert_same_state(found[0][way]["state"], alone["state"])


def test_resuming(found, alone):
    torch.testing.assert_close(mean([process["resumed"] for process in found]), alone["resumed"])


@pytest.mark.parametrize("state_dicts", STATE_DICTS)
def test_checkpoints_of_accelerate_give_back_adapters(found, folder, state_dicts):
    for rank in range(ranks.SIZE):
        saved = ranks.saved_adapters(folder / f"{WAYS[-1]}{rank}")
        assert all(tensor.any() for tensor in saved.values()), "as the other model has none but zeros"
        assert_same_state(ranks.saved_adapters(folder / f"{state_dicts}{rank}"), saved)


def test_checkpoints_of_accelerate_have_adapters_alone(found, folder):
    """And of shards from each process its own: PEFT before 0.21.1 cannot load whole tensors into shards."""
    reader = FileSystemReader(folder / "SHARDED_STATE_DICT" / "pytorch_model_fsdp_0")
    sharded = reader.read_metadata().state_dict_metadata
    whole = torch.load(folder / "FULL_STATE_DICT" / "pytorch_model_fsdp.bin")
    for checkpoint in (sharded, whole):
        assert len(checkpoint) == len(ranks.saved_adapters(folder / f"{WAYS[-1]}0"))
        assert all("lora_" in name for name in checkpoint)
    assert {len(tensor.chunks) for tensor in sharded.values()} == {ranks.SIZE}


@pytest.mark.parametrize("way", ["by hand", "by Transformers"])
def test_saving_gives_the_bytes_of_one_process(found, folder, way):
    ranks.assert_saved_as(folder / way, folder / "qwen3_moe")


def test_a_tied_head_is_stored_once(found, folder):
    ranks.assert_saved_as(folder / "tied" / "by Transformers", folder / "tied")


def test_a_checkpoint_loads_sharded(found, folder):
    expected = ranks.logits(ranks.load(folder / "qwen3_moe"))["logits"]
    assert all(relative(process["loaded"], expected) < 2e-6 for process in found)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantizing_while_loading(found, folder, name):
    """To the bytes of one process, of which each has half, and keeps no more."""
    ranks.assert_saved_as(folder / name / "quantized", folder / name)
    expected = ranks.logits(ranks.load(folder / name))["logits"]
    for process in found:
        assert {parts[:2] for parts in process[name, "sizes"].values()} == {(2, 2)} and process[name, "kept"] == {0}
        assert relative(process[name], expected) < 2e-6
