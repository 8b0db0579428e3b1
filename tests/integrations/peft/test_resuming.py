"""Training loops that checkpoint, stop and go on: the same code as for a model in 16 bits, with the same adapters as
one that was not stopped."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from small import llama
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

import hf_kbit

ROWS = [
    {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}
    for row in torch.randint(1, 256, (16, 12), generator=torch.Generator().manual_seed(0))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    llama(pad_token_id=0).save_pretrained(folder := tmp_path_factory.mktemp("model"))
    return folder


def adapted(folder, bits):
    config = None if bits is None else hf_kbit.KbitConfig(bits=bits)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    if bits:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    set_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))


def arguments(place, steps):
    return {
        "output_dir": str(place),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def by_trainer(folder, bits, place, steps, resumes):
    model = adapted(folder, bits)
    trainer = Trainer(model, TrainingArguments(**arguments(place, steps)), train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=resumes)
    return model


def by_trl(folder, bits, place, steps, resumes):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = models.WordLevel({f"word{number}": number for number in range(256)}, unk_token="word0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="word0", eos_token="word1")
    config = trl.SFTConfig(
        **arguments(place, steps), max_length=12, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in ROWS])
    trainer = trl.SFTTrainer(adapted(folder, bits), args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resumes)
    return trainer.model


def by_accelerate(folder, bits, place, steps, resumes, **how):
    """A loop of one's own, which saves all that it has."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator, model = Accelerator(cpu=True), adapted(folder, bits)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=4))
    if resumes:
        accelerator.load_state(place)
    for number, batch in enumerate(batches):
        if (2 if resumes else 0) <= number < steps:
            accelerator.backward(model.train()(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    if not resumes:
        accelerator.save_state(place, **how)
        accelerator.save_model(model, place / "model")
    return model


LOOPS = {
    "Trainer": by_trainer,
    "TRL": by_trl,
    "accelerate": by_accelerate,
    "accelerate, by torch": lambda *place, **how: by_accelerate(*place, safe_serialization=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_one_that_goes_on_is_one_that_was_not_stopped(loop, bits, folder, tmp_path):
    def trained(place, steps, resumes=False):
        model = LOOPS[loop](folder, bits, tmp_path / place, steps, resumes)
        return {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}

    expected, half = trained("whole", 4), trained("part", 2)
    found = trained("part", 4, resumes=True)
    assert found.keys() == expected.keys() and len(found) == 8
    for name in found:
        assert torch.equal(found[name], expected[name]) and not torch.equal(half[name], expected[name]), name
