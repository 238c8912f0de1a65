"""Checks of the GPUs and of all that decodes images: live, with known pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from .child import Answer, shortened
from .finding import Finding
from .questions import Engine, Format
from .subject import Facts, Subject

LITTLE_BYTES = 1 << 30
"""Free memory of a GPU below which a decoder may find too little, in bytes."""

LEFT_TO_PILLOW = "None is needed with proxyloader.DataLoader, whose workers use Pillow. A DALI pipeline cannot have it"

NAMES = {"cpu": "decoding on the CPU", "engines": "decoding by the engines", "cuda": "decoding by CUDA"}


def gpus(subject: Subject) -> Iterator[Finding]:
    if not subject.torch.told:
        return  # its own check tells
    if not subject.gpus:
        found = "torch sees none, so images are decoded on the CPU"
        remedy = "If there is to be one: nvidia-smi must list it. Start a container with --gpus all"
        yield Finding("GPU", "warn", found, remedy)
    for index, gpu in enumerate(subject.gpus):
        name, free_bytes = f"GPU {index}", gpu["free_bytes"]
        capability = ".".join(map(str, gpu["capability"]))
        engines = {True: "JPEG engines", False: "no JPEG engines, so CUDA decodes", None: "JPEG engines unknown"}
        found = f"{gpu['name']}, compute capability {capability}, {engines[gpu.get('has_engines')]}"
        if gpu["error"]:
            remedy = "Install a build of torch for this GPU. torch.cuda.get_arch_list() says for which it has code"
            yield Finding(name, "fail", f"{found}; torch cannot use it: {gpu['error']}", remedy)
            continue
        found += f", {free_bytes / 2**30:.1f} of {gpu['total_bytes'] / 2**30:.1f} GB free"
        if free_bytes < LITTLE_BYTES:
            yield Finding(name, "warn", found, "End other processes on it: nvidia-smi lists them")
        else:
            yield Finding(name, "ok", found)


def on_cpu(subject: Subject) -> Iterator[Finding]:
    if subject.dali.told:
        yield from _decoding(subject, "cpu", 0, {})


def on_gpus(subject: Subject) -> Iterator[Finding]:
    for index, gpu in enumerate(subject.gpus if subject.dali.told else []):
        if not gpu["error"]:
            yield from _decoding(subject, "engines", index, gpu)
            yield from _decoding(subject, "cuda", index, gpu)


def _decoding(subject: Subject, engine: Engine, index: int, gpu: Facts) -> Iterator[Finding]:
    name = NAMES[engine] + (f" of GPU {index}" if engine != "cpu" else "")
    asked = subject.ask("pictures", engine, str(index))
    right = [each["format"] for each in asked.told if not each["error"] and each["levels_off"] <= each["bound"]]
    if right:
        yield _of_right_ones(name, engine, gpu, asked, right)
    if wrong := [each for each in asked.told if not each["error"] and each["format"] not in right]:
        off = [f"{each['format']} by {each['levels_off']} (allowed: {each['bound']})" for each in wrong]
        found = f"wrong pixels, off by up to so many levels of 255 from Pillow's: {', '.join(off)}"
        yield Finding(name, "fail", found, _advice(subject, engine))
    for error in dict.fromkeys(each["error"] for each in asked.told if each["error"]):
        formats = [each["format"] for each in asked.told if each["error"] == error]
        said = error.partition("encountered: ")[2] or error  # DALI says first where in a pipeline it was
        found = f"{', '.join(formats)}: DALI cannot decode: {shortened(said)}"
        if any("JPEG" in each for each in formats):
            yield Finding(name, "fail", found, _advice(subject, engine))
        else:
            yield Finding(name, "warn", found, LEFT_TO_PILLOW)
    if asked.failure:
        left = get_args(Format)[len(asked.told) :]
        found = f"{left[0] if left else 'the end'}: {asked.failure}"
        yield Finding(name, "fail", found, _advice(subject, engine))


def _of_right_ones(name: str, engine: Engine, gpu: Facts, asked: Answer, right: Sequence[str]) -> Finding:
    found, jpeg = f"pixels are right: {', '.join(right)}", asked.told[0]
    if engine != "engines" or jpeg["format"] not in right or jpeg["by_engines"]:
        return Finding(name, "ok", found)
    found = f"CUDA decodes in their place; {found}"
    if gpu.get("has_engines") is False:
        return Finding(name, "ok", found)
    found += f". DALI has said: {asked.said}" if asked.said else ""
    remedy = (
        "Start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility,video. End other processes that decode "
        "there, or give each CUDA_DEVICE_MAX_CONNECTIONS=8"
    )
    return Finding(name, "warn", found, remedy)


def _advice(subject: Subject, engine: Engine) -> str:
    build = next(iter(subject.dali_builds), "nvidia-dali-cuda120")
    reinstall = f"pip install --force-reinstall {build}, and see that pip check is content. "
    until_then = {
        "cpu": "Until then DataLoader(translate=False) leaves images to torch",
        "engines": "Until then DataLoader(hw_decoder_load=0) has CUDA decode",
        "cuda": 'Until then DataLoader(device="cpu") has the CPU decode',
    }
    return reinstall + until_then[engine]


CHECKS = (gpus, on_cpu, on_gpus)
