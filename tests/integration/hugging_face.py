"""Hugging Face's Trainer, which trains a small ViT. As a script, with this library's loader in the place of torch's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms

from .one_rank import Numbered

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    numbers = torch.tensor([number for _, number in samples])
    return {"pixel_values": torch.stack([image for image, _ in samples]), "labels": numbers % 4, "numbers": numbers}


def run(kind: Any, root: str, folder: str) -> dict[str, Any]:
    """Two epochs; and the second half of them again, from a checkpoint.

    Args:
        kind: class of the loaders that the trainer is given and prepares; None: it makes them itself.
    """
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    dataset = Numbered(root, TRANSFORM)
    numbers: list[list[int]] = []
    loaders: list[Any] = []

    class Ours(Trainer):
        def get_train_dataloader(self) -> Any:
            if kind is None:
                loader = super().get_train_dataloader()
            else:
                loader = self.accelerator.prepare(kind(dataset, 8, True, num_workers=1, collate_fn=collate))
            loaders.append(loader)
            return loader

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            numbers.append(inputs["numbers"].tolist())
            return super().training_step(model, inputs, *rest)

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            return super().compute_loss(model, {k: v for k, v in inputs.items() if k != "numbers"}, *rest, **named)

    def trainer(**how: Any) -> Trainer:
        torch.manual_seed(1)
        config = ViTConfig(
            image_size=32,
            patch_size=16,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=4,
            hidden_dropout_prob=0.0,
        )
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            num_train_epochs=2,
            per_device_train_batch_size=8,
            dataloader_num_workers=1,
            logging_steps=1,
            save_steps=8,
            eval_strategy="epoch",
            learning_rate=0.01,
            remove_unused_columns=False,
            disable_tqdm=True,
            **how,
        )
        model = ViTForImageClassification(config)
        return Ours(model, arguments, data_collator=collate, train_dataset=dataset, eval_dataset=dataset)

    told: dict[str, Any] = {}
    for name, resume in (("losses", None), ("resumed", str(Path(folder) / "checkpoint-8"))):
        trained = trainer()
        trained.train(resume_from_checkpoint=resume)
        history = trained.state.log_history
        told[name] = [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
    told["numbers"] = numbers
    if kind is None or not isinstance(kind, type):
        import proxyloader

        assert all(isinstance(loader, proxyloader.DataLoader) for loader in loaders)
        counts = loaders[0].base_dataloader._counts
        assert counts.images[0] and not counts.images[2], vars(counts)
    return told


def whole_program() -> None:
    import proxyloader

    torch.utils.data.DataLoader = proxyloader.DataLoader  # type: ignore[misc]
    with_losses = run(None, *sys.argv[1:3])
    print(json.dumps(with_losses))
