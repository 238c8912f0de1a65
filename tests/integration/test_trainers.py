"""Trainers train, evaluate and resume with this loader as with torch's: the same batches, and the same losses."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import BatchSampler, DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader import DataLoader, ProxyServer, World

from .. import scripts
from ..limits import WAIT_S
from ..side_by_side import assert_same
from .one_rank import Numbered
from .roads import picture_folder, picture_pipeline, read_bytes
from .test_frameworks import section

OURS = functools.partial(proxyloader.DataLoader, device="cpu")
KINDS = (StockLoader, OURS)
TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
LOSS = 0.01
"""Most that losses may differ by, of a net that sees images a rounding apart."""

pytestmark = pytest.mark.usefixtures("no_accelerator_is_left")

quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
"""Trainers advise more workers, and use names that torch and others will remove."""


def photographs(root: Path, transform: Any = TRANSFORM) -> Any:
    return Numbered(str(root), transform)


def loader_of(kind: Any, root: Path, **arguments: Any) -> Any:
    return kind(photographs(root), 8, **{"num_workers": 1, "shuffle": True} | arguments)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 4))
        self.seen: list[Any] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(images.clone())
        out: torch.Tensor = self.layers(images)
        return out


def loss_of(out: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, numbers % 4)


def assert_by_dali(loader: Any, kind: Any = OURS) -> None:
    """Where it is to be ours, it is, and DALI has made its images."""
    assert isinstance(loader, proxyloader.DataLoader) == (kind is OURS)
    if kind is OURS:
        stats = loader.stats()
        assert stats.images_by_dali and not stats.images_by_workers


def both(run: Callable[[Any], Any]) -> list[Any]:
    """What a program gives with our loaders, and with torch's."""
    return [(torch.manual_seed(4), run(kind))[1] for kind in (OURS, StockLoader)]


@quiet
def test_lightning_fits_validates_and_predicts(photos: Path) -> None:
    lightning = pytest.importorskip("lightning")

    def run(kind: Any) -> Any:
        module, trainer = lightning_module(lightning), lightning_trainer(lightning, max_epochs=2)
        loaders = loader_of(kind, photos), loader_of(kind, photos, shuffle=False, num_workers=0)
        trainer.fit(module, *loaders)
        trainer.validate(module, loaders[1], verbose=False)
        predicted = trainer.predict(module, loaders[1])
        for loader in (loaders[0], trainer.predict_dataloaders):
            assert_by_dali(loader, kind)
        return [module.net.seen, module.numbers], predicted

    (ours, predicted), (theirs, expected) = both(run)
    assert len(ours[0]) == 2 * (6 + 6) + 6 + 6
    assert_same(ours, theirs)
    assert all((a - b).abs().max() < LOSS for a, b in zip(predicted, expected))


@quiet
def test_lightnings_checkpoint_of_mid_epoch_brings_back_what_was_left(photos: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Saves(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "state")

    def fitted(**resume: Any) -> list[Any]:
        module, trainer = lightning_module(lightning), lightning_trainer(lightning, max_epochs=3, callbacks=[Saves()])
        trainer.fit(module, loader_of(OURS, photos, seed=3), **resume)
        return list(zip(module.net.seen, module.numbers))

    whole = fitted()
    rest = fitted(ckpt_path=tmp_path / "state", weights_only=False)
    assert len(whole) == 18
    assert_same(rest, whole[8:])


def lightning_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.numbers = Net(), []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, numbers = batch
            self.numbers.append(numbers.tolist())
            return loss_of(self.net(images), numbers)

        def validation_step(self, batch: Any, number: int) -> None:
            self.training_step(batch, number)

        def predict_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def lightning_trainer(lightning: Any, **how: Any) -> Any:
    quietly = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    return lightning.Trainer(accelerator="cpu", num_sanity_val_steps=0, **quietly | how)


def test_trainers_of_two_processes(photos: Path, tmp_path: Path) -> None:
    """Lightning's and Fabric's with a sampler of theirs, and Lightning's of a loader that divides its samples."""
    pytest.importorskip("lightning")
    script = "from tests.integration.test_trainers import two_trainers; two_trainers()"
    environment = {"OMP_NUM_THREADS": "1"}
    done = scripts.run(script, tmp_path / "meet", photos, timeout_s=2 * WAIT_S, environment=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = sorted(lines, key=lambda each: each["rank"])
    assert [each["rank"] for each in told] == [0, 1]
    for name in ("lightning", "fabric", "num_shards"):
        for epoch in range(2):
            first, second = (each[name][epoch] for each in told)
            assert len(first) == len(second) and sorted(first + second) == list(range(48)), name
        assert told[0][name][0] != told[0][name][1], name


def trained(loader: Any, epochs: int = 2) -> Any:
    net, losses = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(epochs):
        for images, numbers in loader:
            loss = loss_of(net(images), numbers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return net.seen, losses


def assert_same_training(run: Callable[[Any], Any]) -> None:
    """Of 24 batches, or the losses of some of them at least."""
    ours, theirs = both(run)
    assert len(ours[0]) in (12, 24)
    assert_same(ours[0], theirs[0])
    assert ours[1] == pytest.approx(theirs[1], abs=LOSS) and len(ours[1]) > 1


def test_ignite_trains_and_evaluates(photos: Path) -> None:
    engine = pytest.importorskip("ignite.engine")

    def run(kind: Any) -> Any:
        net, losses = Net(), []
        trainer = engine.create_supervised_trainer(net, torch.optim.SGD(net.parameters(), 0.1), loss_of)
        evaluator = engine.create_supervised_evaluator(net)
        train, validate = loader_of(kind, photos), loader_of(kind, photos, shuffle=False)
        trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, lambda _: evaluator.run(validate))
        trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, lambda each: losses.append(each.state.output))
        trainer.run(train, max_epochs=2)
        assert_by_dali(train, kind)
        return net.seen, losses

    assert_same_training(run)


@quiet
def test_ignites_deterministic_engine_goes_on_in_mid_epoch(photos: Path) -> None:
    """It puts a batch sampler of its own into a loader that it builds anew."""
    deterministic = pytest.importorskip("ignite.engine.deterministic").DeterministicEngine
    Events = importlib.import_module("ignite.engine").Events

    def run(kind: Any) -> Any:
        seen: list[Any] = []
        states: list[Any] = []
        loader = loader_of(kind, photos)
        engine, anew = (deterministic(lambda _, batch: seen.append(batch)) for _ in range(2))
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=8), lambda each: states.append(each.state_dict()))
        engine.run(loader, max_epochs=2)
        anew.load_state_dict(states[0])
        anew.run(loader, max_epochs=2)
        assert_by_dali(engine.state.dataloader, kind)
        return seen

    ours, theirs = both(run)
    assert len(ours) == 16
    assert_same(ours, theirs)


@quiet
def test_fastais_learner_trains(photos: Path) -> None:
    fastai = pytest.importorskip("fastai.vision.all")

    def run(kind: Any) -> Any:
        net, train = Net(), loader_of(kind, photos)
        loaders = fastai.DataLoaders(train, loader_of(kind, photos, shuffle=False), device="cpu")
        learner = fastai.Learner(loaders, net, loss_func=loss_of, opt_func=fastai.SGD, lr=0.1)
        with learner.no_bar(), learner.no_logging():
            learner.fit(2)
        assert_by_dali(train, kind)
        return net.seen, [float(loss) for loss in learner.recorder.losses]

    assert_same_training(run)


@quiet
def test_composers_trainer_trains_and_evaluates(photos: Path) -> None:
    composer = pytest.importorskip("composer")

    class Model(composer.ComposerModel):  # type: ignore[misc,name-defined]
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, out: torch.Tensor, batch: Any) -> torch.Tensor:
            return loss_of(out, batch[1])

    def run(kind: Any) -> Any:
        net, train = Net(), loader_of(kind, photos)
        loaders = {"train_dataloader": train, "eval_dataloader": loader_of(kind, photos, shuffle=False)}
        how = {"max_duration": "2ep", "device": "cpu", "seed": 5, "progress_bar": False}
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        trainer = composer.Trainer(model=Model(net), optimizers=optimizer, **loaders, **how)
        trainer.fit()
        trainer.close()
        atexit.unregister(trainer.engine._close)  # which keeps the trainer, and with it the loaders
        assert_by_dali(train, kind)
        return net.seen

    ours, theirs = both(run)
    assert len(ours) == 24
    assert_same(ours, theirs)


def test_timms_loop_trains(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``create_loader`` makes the loader and what its train.py wraps around it, of torch's name for the class."""
    timm_data = pytest.importorskip("timm.data")
    how = {"is_training": True, "use_prefetcher": False, "num_workers": 1, "color_jitter": None}
    how |= {"persistent_workers": False, "device": torch.device("cpu")}

    def run(kind: Any) -> Any:
        monkeypatch.setattr(torch.utils.data, "DataLoader", kind)
        loader = timm_data.create_loader(timm_data.ImageDataset(str(photos)), (3, 32, 32), 8, **how)
        found = trained(loader)
        assert_by_dali(loader, kind)
        return found

    assert_same_training(run)


@quiet
def test_hugging_faces_trainer_trains_and_resumes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.trainer")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread
    theirs, ours = (
        by_hugging_face(kind, str(photos), str(tmp_path / name)) for kind, name in zip(KINDS, ("torch", "ours"))
    )
    assert_same_losses(ours, theirs)
    script = "from tests.integration.test_trainers import whole_program; whole_program()"
    done = scripts.run(script, photos, tmp_path / "swapped", timeout_s=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
    assert_same_losses(json.loads(done.stdout.splitlines()[-1]), theirs)


def assert_same_losses(ours: Any, theirs: Any) -> None:
    assert ours["numbers"] == theirs["numbers"]
    for name in ("losses", "resumed"):
        assert ours[name] == pytest.approx(theirs[name], abs=LOSS) and len(ours[name]) > 5, name


@quiet
def test_what_the_page_says_of_accelerate_runs(photos: Path) -> None:
    pytest.importorskip("accelerate")
    names: dict[str, Any] = {"dataset": photographs(photos)}
    exec(section("trainers.md", "Accelerate")[0], names)
    assert len(list(names["loader"])) == 1
    assert_by_dali(names["loader"])


@quiet
def test_what_the_page_says_of_lightning_runs(photos: Path) -> None:
    lightning = pytest.importorskip("lightning")
    (code,) = section("trainers.md", "Lightning and Fabric")
    assert 'devices=8, strategy="ddp"' in code
    code = code.replace('lightning.Trainer(devices=8, strategy="ddp")', "lightning_trainer(lightning, max_epochs=1)")
    module = lightning_module(lightning)
    names = {"lightning": lightning, "lightning_trainer": lightning_trainer, "DataLoader": OURS}
    exec(code, names | {"dataset": photographs(photos), "module": module})
    assert len(module.numbers) == 1


@quiet
def test_what_the_page_says_of_fastai_runs(photos: Path) -> None:
    fastai = pytest.importorskip("fastai")
    pytest.importorskip("fastai.learner")
    (code,) = section("trainers.md", "fastai")
    names: dict[str, Any] = {"fastai": fastai, "DataLoader": OURS, "model": Net(), "loss": loss_of}
    exec(code, names | dict.fromkeys(("train_set", "test_set"), photographs(photos)))


@quiet
def test_what_the_page_says_of_hugging_faces_trainer_runs(photos: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole_program, one_loader = section("trainers.md", "Hugging Face's Trainer")
    assert "torch.utils.data.DataLoader = proxyloader.DataLoader" in whole_program
    names = {"proxyloader": proxyloader, "torch": torch, "Trainer": transformers.Trainer}
    exec(one_loader, names)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = names["MyTrainer"](Net(), arguments, collate, photographs(photos))
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["pixel_values"].dtype == torch.bfloat16


# --- Hugging Face's Trainer ------------------------------------------------------------------------------------------


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    numbers = torch.tensor([number for _, number in samples])
    return {"pixel_values": torch.stack([image for image, _ in samples]), "labels": numbers % 4, "numbers": numbers}


def by_hugging_face(kind: Any, root: str, folder: str) -> dict[str, Any]:
    """Two epochs; and the second half of them again, from a checkpoint. The trainer makes a loader of None itself."""
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    dataset = photographs(Path(root))
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

    def trainer() -> Trainer:
        torch.manual_seed(1)
        sizes = {"image_size": 32, "patch_size": 16, "hidden_size": 16, "intermediate_size": 16}
        config = ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=4, hidden_dropout_prob=0.0)
        how: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "dataloader_num_workers": 1}
        how |= {"learning_rate": 0.01, "use_cpu": True, "remove_unused_columns": False, "disable_tqdm": True}
        how |= {"report_to": [], "logging_steps": 1, "save_steps": 8, "eval_strategy": "epoch"}
        arguments = TrainingArguments(folder, **how)
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
        assert all(isinstance(loader, proxyloader.DataLoader) for loader in loaders)
        counts = loaders[0].base_dataloader._recorder
        assert counts.images[0] and not counts.images[2], vars(counts)
    return told


def whole_program() -> None:
    """A script, with this library's loader in the place of torch's."""
    torch.utils.data.DataLoader = proxyloader.DataLoader  # type: ignore[misc]
    print(json.dumps(by_hugging_face(None, *sys.argv[1:3])))


# --- two processes ---------------------------------------------------------------------------------------------------


def two_trainers() -> None:
    """A script: trainers of two processes, which are forked when these are imported. Each prints one line of JSON."""
    importlib.import_module("lightning")
    gc.freeze()  # else each process looks at all that is imported when it ends
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            of_rank(rank)
            return
    assert [os.waitpid(each, 0)[1] for each in ranks] == [0, 0]


def of_rank(rank: int) -> None:
    import lightning

    faulthandler.dump_traceback_later(1.8 * WAIT_S, exit=True)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "", "MASTER_PORT": ""}  # by which Lightning knows it
    distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
    told: dict[str, Any] = {"rank": rank, "num_shards": by_lightning(OURS, num_shards="auto", seed=5)[0]}
    with pytest.raises(ValueError, match="use_distributed_sampler=False"):
        lightning_trainer(lightning, max_epochs=1, devices=2, strategy="ddp").fit(
            lightning_module(lightning), loader_of(OURS, Path(sys.argv[2]), num_shards="auto")
        )
    for name, run in {"lightning": by_lightning, "fabric": by_fabric}.items():
        theirs, ours = (run(kind) for kind in KINDS)
        assert_same(ours[1:], theirs[1:], name)
        told[name] = ours[0]
        assert ours[0] == theirs[0]
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once, as both write to one pipe
    distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def by_lightning(kind: Any, **options: Any) -> Any:
    """The samples of two epochs, and the images."""
    import lightning

    lightning.seed_everything(4)
    module = lightning_module(lightning)
    trainer = lightning_trainer(lightning, max_epochs=2, devices=2, strategy="ddp", use_distributed_sampler=not options)
    trainer.fit(module, loader_of(kind, Path(sys.argv[2]), **options))
    assert isinstance(trainer.train_dataloader, proxyloader.DataLoader) == (kind is OURS)
    return [list(chain(*module.numbers[k : k + 3])) for k in (0, 3)], module.net.seen


def by_fabric(kind: Any) -> Any:
    import lightning

    torch.manual_seed(4)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = Net()
    module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = fabric.setup_dataloaders(loader_of(kind, Path(sys.argv[2])))
    epochs: list[list[int]] = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for images, numbers in loader:
            fabric.backward(loss_of(module(images), numbers))
            optimizer.step()
            optimizer.zero_grad()
            epochs[-1] += numbers.tolist()
    assert_by_dali(loader._dataloader, kind)
    return epochs, net.seen


# --- loaders that libraries build anew -------------------------------------------------------------------------------


OPTIONS = {
    "device": "cpu",
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
    "seed": 7,
    "on_error": "skip",
    "check_scans": False,
    "translate": False,
    "masks_on_device": True,
    "targets_on_device": True,
    "prefetch": 3,
    "num_threads": 2,
    "hw_decoder_load": 0.5,
}


def public_attributes(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def by_all_attributes(loader: Any) -> Any:
    """As ignite does, for a batch sampler that it can set back."""
    given = public_attributes(loader)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        del given[name]
    return type(loader)(**given, batch_sampler=BatchSampler(loader.sampler, loader.batch_size, loader.drop_last))


def by_what_is_not_default(loader: Any) -> Any:
    """As Lightning does, for a sampler that deals samples out to processes."""
    attributes = public_attributes(loader) | {"multiprocessing_context": loader.multiprocessing_context}
    arguments = inspect.signature(type(loader)).parameters
    given = {name: value for name, value in attributes.items() if value is not arguments[name].default}
    return type(loader)(**given | {"sampler": loader.sampler, "batch_sampler": None, "shuffle": False})


def by_the_arguments(loader: Any) -> Any:
    """Whatever the constructor takes and the loader has."""
    names = set(inspect.signature(type(loader)).parameters) - {"batch_sampler"}
    return type(loader)(**{name: getattr(loader, name) for name in names if hasattr(loader, name)})


WAYS = [by_all_attributes, by_what_is_not_default, by_the_arguments]


def batches_of(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [(images.clone(), labels.tolist()) for images, labels in loader]


PLAIN = {"num_workers": 2, "prefetch_factor": 3, "drop_last": True, "in_order": True, "timeout": 30}
SHARD = {"num_shards": World(2, 1), "seed": 5, "device": "cpu"}
LOADERS: dict[str, dict[str, Any]] = {
    "plain, used": PLAIN,
    "with options of ours": OPTIONS | {"num_workers": 2},
    **{policy: SHARD | {"last_batch_policy": policy} for policy in ("fill", "partial", "drop")},
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_rebuilt_loader_is_set_as_the_one_before_and_gives_its_batches(photos: Path, name: str) -> None:
    arguments = LOADERS[name]
    for rebuilt in WAYS:
        loader = DataLoader(ImageFolder(str(photos), TRANSFORM), 7, shuffle=True, **arguments)
        if "used" in name:
            batches_of(loader)
        again = rebuilt(loader)
        if arguments.keys() >= OPTIONS.keys():
            assert {option: getattr(again, option) for option in OPTIONS} == OPTIONS
        expected = batches_of(loader)
        if "num_shards" in arguments:
            assert sum(len(labels) for _, labels in expected) in (21, 24, 28)
            again.set_epoch(0)  # the sampler is shared
        found = batches_of(again)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found[0][0].dtype == arguments.get("dtype", torch.float32)


@pytest.mark.parametrize("rebuilt", WAYS)
def test_a_rebuilt_loader_has_the_server_of_the_one_before(spelled_root: Path, rebuilt: Any) -> None:
    with ProxyServer(picture_pipeline("cpu")) as server:
        loader = DataLoader(picture_folder(spelled_root, server.proxy, read_bytes), 4, server=server)
        torch.testing.assert_close(batches_of(rebuilt(loader)), batches_of(loader), rtol=0, atol=0)
