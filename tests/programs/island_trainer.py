"""Hugging Face's Trainer with `fsdp`, which saves sharded checkpoints."""

import sys

import sharded_on_cpus  # noqa: F401
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from shared import BATCH, Words, gpt, tell
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments

data, model = Words(), gpt()
if sys.argv[1:2] == ["load"]:  # in one process: of what the training has left
    merge_fsdp_weights(sys.argv[2], "whole")
    model.load_state_dict(load_file("whole/model.safetensors"), strict=False)
    tell(model, 0.0, data.loss(model))
else:
    before = data.loss(model)
    arguments = TrainingArguments(
        "out",
        num_train_epochs=12,
        per_device_train_batch_size=BATCH // 2,
        learning_rate=5e-3,
        save_steps=24,
        save_total_limit=2,
        eval_strategy="epoch",
        fsdp=True,
        fsdp_config={
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=Words(32, seed=2))
    trainer.train()
    assert trainer.accelerator.num_processes == 2 and trainer.is_fsdp_enabled
    whole = gpt()
    whole.load_state_dict(get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True)))
    tell(whole, before, data.loss(whole), data, rate=trainer.lr_scheduler.get_last_lr()[0])
