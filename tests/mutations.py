"""Faults that the default run of the tests must find: plants one after the other in a copy, and runs the tests on it.

    python -m tests.mutations                  # all; some twenty minutes on two cores
    python -m tests.mutations "a label" crop   # those whose names hold one of these words
    python -m tests.mutations --list

A fault is found where a test fails. Each names the test files that should find it. Exit status 1: one was not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
TESTS_FAILED = 1
"""Exit status of pytest. It is another one where no test ran, as of a fault that nobody can import."""


class Mutation(NamedTuple):
    """A fault.

    Attributes:
        name: what is wrong then.
        file: of the package.
        before: what stands there once.
        after: what is planted in its place.
        tests: files under tests/, or parts of one, of which one at least must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = [
    # --- transforms ---
    Mutation(
        "a centred crop is one pixel off",
        "transforms/geometry.py",
        "    return round((available - wanted) / 2.0)",
        "    return round((available - wanted) / 2.0) + (available > wanted)",
        "transforms/test_geometry.py",
    ),
    Mutation(
        "a random crop forgets its padding above",
        "transforms/geometry.py",
        "        return i - top, j - left, *self.size",
        "        return i, j - left, *self.size",
        "transforms/test_geometry.py",
    ),
    Mutation(
        "a vertical flip is a horizontal one",
        "dali/operators/geometry.py",
        "fn.flip(graph.decoded(), horizontal=0, vertical=wanted)",
        "fn.flip(graph.decoded(), horizontal=wanted, vertical=0)",
        "transforms/test_geometry.py",
    ),
    Mutation(
        "the rows of a nearest resize are counted as its columns",
        "transforms/resize.py",
        "_taken_by_pillow(rows, new_size[0])",
        "_taken_by_pillow(rows, new_size[1])",
        "transforms/test_resize.py",
    ),
    Mutation(
        "brightness is contrast in what is automatic",
        "transforms/auto_augment.py",
        '"Brightness": (color.Brightness(kind),)',
        '"Brightness": (color.Contrast(kind),)',
        "transforms/test_auto_augment.py",
    ),
    Mutation(
        "a chain of operations loses its last one",
        "transforms/auto_augment.py",
        "put_chain(self.source.choice, chains[0] if chains else []",
        "put_chain(self.source.choice, chains[0][:-1] if chains else []",
        "transforms/test_auto_augment.py",
    ),
    Mutation(
        "a transform acts with one minus its probability",
        "transforms/container.py",
        "drawn <= self.p if self.closed else drawn < self.p",
        "drawn <= self.p if self.closed else drawn >= self.p",
        "transforms/test_container.py transforms/test_geometry.py",
    ),
    Mutation(
        "the erased box has its sides exchanged",
        "transforms/augment.py",
        "        row.extend((top, left, height, width))",
        "        row.extend((top, left, width, height))",
        "transforms/test_augment.py",
    ),
    Mutation(
        "colours are adjusted in one order always",
        "transforms/random_color.py",
        "for which in order.tolist():",
        "for which in sorted(order.tolist()):",
        "transforms/test_color.py",
    ),
    Mutation(
        "the mean is not divided by the deviation",
        "dali/fused_normalize.py",
        "(offset - mean) / std",
        "offset - mean",
        "dali/test_fused_normalize.py integration/test_same_batches.py",
    ),
    Mutation(
        "levels are divided by 256",
        "dali/fused_normalize.py",
        "factor, offset = factor / 255, offset / 255",
        "factor, offset = factor / 256, offset / 255",
        "dali/test_fused_normalize.py integration/test_same_batches.py",
    ),
    # --- reading ---
    Mutation(
        "a damaged JPEG passes for a whole one",
        "data/jpeg.py",
        "        return str(error)",
        '        return ""',
        "data/test_jpeg.py workers/test_scan_checks.py",
    ),
    Mutation(
        "the damaged ones are remembered as sound",
        "workers/scan_checks.py",
        "not are_passed and damaged == checks.damaged",
        "not are_passed",
        "workers/test_scan_checks.py integration/test_caught_errors.py",
    ),
    Mutation(
        "a lost block in a JPEG is not looked for",
        "data/jpeg.py",
        "data.find(LOST, header.first_scan) < 0",
        "True",
        "data/test_jpeg.py",
    ),
    Mutation(
        "an image that Pillow raises an error for is decoded late",
        "data/jpeg.py",
        "return consumed < 0 and code >= 0",
        "return True",
        "integration/test_mutated_jpegs.py",
    ),
    Mutation(
        "a JPEG in RGB is taken for one in YCbCr",
        "data/jpeg.py",
        "alike = alike and adobe_transform != 0",
        "alike = alike and adobe_transform != 3",
        "integration/test_hostile_jpegs.py data/test_jpeg.py",
    ),
    Mutation(
        "a full disk is taken for a bad file",
        "data/bad_samples.py",
        "return error.errno in FILE_ERRNOS",
        "return True",
        "integration/test_unreadable.py",
    ),
    Mutation(
        "a sample is replaced by itself",
        "workers/fetch.py",
        "candidate = (first + step) % size",
        "candidate = (first + step - 1) % size",
        "integration/test_unreadable.py",
    ),
    Mutation(
        "an image that was changed is handed on as its file",
        "data/lazy_image.py",
        "        self.__dict__.pop(_IMAGE, None)  # last, as another thread may ask for pixels\n",
        "",
        "data/test_lazy_image.py",
    ),
    # --- tensors and transforms that are met late ---
    Mutation(
        "values that are asked for are drawn anew",
        "data/transformed.py",
        "contextlib.nullcontext() if states is None else",
        "contextlib.nullcontext() if True else",
        "integration/test_random_programs.py",
    ),
    Mutation(
        "an assignment to a recorded tensor changes those that were recorded before",
        "data/recorded.py",
        "tensor = args[0] if writes_over else args[0].clone()\n        tensor[args[1]]",
        "tensor = args[0]\n        tensor[args[1]]",
        "data/test_lazy_tensor.py",
    ),
    Mutation(
        "operations are recorded without end",
        "data/recorded.py",
        "each.depth >= DEEPEST",
        "False",
        "data/test_lazy_tensor.py",
    ),
    Mutation(
        "data that are put in place of a tensor's own are lost",
        "data/lazy_tensor.py",
        "name in USES_VALUES or function == SET_DATA",
        "name in USES_VALUES",
        "data/test_lazy_tensor.py",
    ),
    Mutation(
        "a tensor that is decoded late is looked up as a class of ours",
        "data/lazy_tensor.py",
        "return cls is other or cls.stock is other",
        "return cls is other",
        "integration/test_called_transforms.py",
    ),
    Mutation(
        "a default dtype that changes later is not seen",
        "data/called_transforms.py",
        "torch.get_default_dtype() is not torch.float32",
        "False",
        "integration/test_called_transforms.py",
    ),
    Mutation(
        "pixels that a failed batch used are another loader's",
        "workers/worker.py",
        "        self._packer.begin_batch()\n",
        "",
        "loader/test_backend.py",
    ),
    Mutation(
        "CUDA decodes large photographs where there are few cores, too",
        "dali/operators/graph.py",
        " and cores >= MANY_CORES",
        "",
        "dali/test_build.py",
    ),
    Mutation(
        "a missing file is an error of no class that torchvision's loader raises",
        "data/encoded_image.py",
        "errno=error.errno, kind=image_error_like(error))",
        "errno=error.errno)",
        "integration/test_caught_errors.py",
    ),
    Mutation(
        "a translated transform that its dataset changes stays as it was",
        "data/compiled_transform.py",
        "self.as_translated.is_as_it_was()",
        "True",
        "integration/test_called_transforms.py",
    ),
    Mutation(
        "an image is made by the settings that its transform has later",
        "transforms/chain.py",
        "self._continued(_as_it_is(transform))",
        "self._continued(transform)",
        "integration/test_called_transforms.py",
    ),
    Mutation(
        "an operation writes over an image that something else uses, too",
        "workers/packing.py",
        "self._uses[output.output, run] == 1",
        "True",
        "data/test_lazy_tensor.py",
    ),
    Mutation(
        "a change in place does not reach the views of a tensor",
        "data/lazy_tensor.py",
        "    return all(other is first for other in _sharers(first))\n",
        "    return True\n",
        "data/test_lazy_tensor.py integration/test_random_programs.py",
    ),
    Mutation(
        "a transform that was changed is taken for what it was",
        "transforms/chain.py",
        "return (kind, _values(transform)) if kind in RULES and not has_tensors else Same(transform)",
        "return Same(transform)",
        "transforms/test_chain.py",
    ),
    # --- order ---
    Mutation(
        "two shards overlap by a sample",
        "data/sharded_sampler.py",
        "return shard * samples // shards, (shard + 1) * samples // shards",
        "return shard * samples // shards, -(-(shard + 1) * samples // shards)",
        "data/test_sharded_sampler.py integration/test_sharded_loader.py",
    ),
    Mutation(
        "a shard that is filled up repeats its first sample",
        "data/sharded_sampler.py",
        "return own + part[-1:] * (length - len(own))",
        "return own + part[:1] * (length - len(own))",
        "data/test_sharded_sampler.py integration/test_sharded_loader.py",
    ),
    Mutation(
        "another number of processes takes up what the first shard left, once for each",
        "data/sharded_sampler.py",
        "order = torch.cat([order[first:end][each:] for first, end in ranges])",
        "order = torch.cat([order[ranges[0][0] : ranges[0][1]][each:] for _ in ranges])",
        "data/test_sharded_sampler.py integration/test_sharded_loader.py",
    ),
    Mutation(
        "a dataset that catches the errors of damaged files does not meet them",
        "data/encoded_image.py",
        "if is_sound(jpeg, header, scans):",
        "if True:",
        "integration/test_caught_errors.py",
    ),
    Mutation(
        "where processes train together, a skipped batch is missing in one of them",
        "workers/fetch.py",
        "if self.keeps_batches and not fetched.samples and fetched.unreadable:",
        "if False:",
        "integration/test_unreadable.py",
    ),
    Mutation(
        "the last batch, a smaller one, is lost",
        "workers/request_sampler.py",
        "BatchSampler(rest, sampler.batch_size, sampler.drop_last)",
        "BatchSampler(rest, sampler.batch_size, True)",
        "integration/test_torch_contract.py",
    ),
    Mutation(
        "the first request is drawn twice from a sampler",
        "workers/request_sampler.py",
        "indices = next(remaining, _END)",
        "indices = next(iter(self._sampler), _END) if first else next(remaining, _END)",
        "integration/test_torch_contract.py workers/test_request_sampler.py",
    ),
    Mutation(
        "all epochs have the order of the first",
        "workers/loader_state.py",
        "return LoaderState(self.epoch + 1)",
        "return LoaderState(self.epoch)",
        "integration/test_reproduction.py",
    ),
    Mutation(
        "a batch of a Subset is read from other places of its folder",
        "workers/fetch_folder.py",
        "        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset",
        "        dataset = dataset.dataset",
        "workers/test_fetch_folder.py",
    ),
    Mutation(
        "a batch whose transform fails leaves other numbers to the next one",
        "workers/fetch_folder.py",
        "            set_states(before)\n",
        "",
        "workers/test_fetch_folder.py",
    ),
    Mutation(
        "a folder whose dataset changes the class of a sample is read without it",
        "workers/fetch_folder.py",
        "        and folder.target_transform is None\n",
        "",
        "workers/test_fetch_folder.py",
    ),
    Mutation(
        "numbers that were drawn ahead are drawn again",
        "transforms/random_numbers.py",
        "        self._drawn(self._at, 0.0, 1.0)\n",
        "        pass\n",
        "transforms/test_random_numbers.py",
    ),
    Mutation(
        "all samples of an epoch are given the same random numbers",
        "workers/fetch.py",
        "seed_generators(seed, epoch, _plain(index))",
        "seed_generators(seed, epoch)",
        "integration/test_reproduction.py",
    ),
    Mutation(
        "a resumed epoch begins a batch too early",
        "workers/request_sampler.py",
        "        loader_state.samples += self.places(len(request.each()))",
        "        loader_state.samples += self.places(len(request.each())) if loader_state.samples else 0",
        "integration/test_reproduction.py integration/test_states.py",
    ),
    Mutation(
        "a resumed stream begins at its start",
        "loader/feed.py",
        "self._to_throw_away = loader_state.batches if",
        "self._to_throw_away = 0 if",
        "integration/test_reproduction.py integration/test_states.py",
    ),
    Mutation(
        "a state of another seed is taken",
        "workers/loader_state.py",
        'if state["seed"] != seed:',
        'if state["seed"] == "another":',
        "workers/test_request_sampler.py",
    ),
    Mutation(
        "after a break the next order is drawn from a generator that is too far ahead",
        "workers/draws_ahead.py",
        "            generator.set_state(self._states[0])",
        "            generator.set_state(self._states[-1])",
        "integration/test_torch_contract_use.py",
    ),
    Mutation(
        "Ctrl-C while DALI is imported leaves a part of it, with which no loader works",
        "dali/api.py",
        "with interrupts_deferred():",
        "if interrupts_deferred:",
        "test_lifetime.py",
    ),
    # --- the way of a batch ---
    Mutation(
        "what a dataset keeps of a batch stays in the memory of the next one",
        "data/batch_memory.py",
        "            if count > of_none + 2:",
        "            if count > 99:",
        "workers/test_batch_memory.py integration/test_kept_images.py",
    ),
    Mutation(
        "a child that a dataset forks reads files into the batch of its parent",
        "data/batch_memory.py",
        "after_in_child=batch_memory.stop)",
        "after_in_child=int)",
        "integration/test_kept_images.py",
    ),
    Mutation(
        "files of one size are taken to follow each other where they were read",
        "workers/packing.py",
        "        if one_shape:  # they follow each other",
        "        if one_shape and arrays[0].ndim > 1:",
        "workers/test_batch_memory.py",
    ),
    Mutation(
        "a loader in a dataset takes files of the outer one's batch for its own",
        "workers/packing.py",
        "batch_memory.offset_of(array) if self._in_slot else None",
        "batch_memory.offset_of(array)",
        "integration/test_kept_images.py",
    ),
    Mutation(
        "each new worker copies its first batch, as nobody tells it how large batches are",
        "workers/messages.py",
        "            if batch.size_bytes > arena.batch_bytes:",
        "            if False:",
        "workers/test_batch_memory.py",
    ),
    Mutation(
        "behind a small first batch the engines decode a few images of each batch, and CUDA the others",
        "dali/plan_server.py",
        "            if len(inputs[0]) > self._fits_images:",
        "            if not self._fits_images:",
        "dali/test_plan_server.py",
    ),
    Mutation(
        "the images of a batch are turned round, and its labels are not",
        "workers/packing.py",
        "self.runs.append(list(calls))",
        "self.runs.append(list(reversed(calls)))",
        "integration/test_same_batches.py integration/test_faults_structure.py",
    ),
    Mutation(
        "an image that is used twice takes the next one's place",
        "workers/packing.py",
        "            self._rows[id(call)] = run, len(self.runs[run])\n            self.runs[run].append(call)",
        "            self.runs[run].append(call)\n            self._rows[id(call)] = run, len(self.runs[run]) - 2",
        "integration/test_faults_structure.py",
    ),
    Mutation(
        "the newest batch under way is handed out first",
        "loader/feed.py",
        "return self._in_flight.popleft() if",
        "return self._in_flight.pop() if",
        "integration/test_same_batches.py integration/test_faults_epochs.py",
    ),
    Mutation(
        "a slot is lost where a loop is left early",
        "loader/feed.py",
        "                self._submitter.forget(in_flight)\n                self.give_back_slot(in_flight)",
        "                self._submitter.forget(in_flight)",
        "integration/test_faults_epochs.py integration/test_faults_limits.py workers loader",
    ),
    Mutation(
        "a slot is lost with a batch that nobody asks for any more",
        "workers/request_sampler.py",
        "                self._arena.give_back(request.slot)\n        self._unanswered.clear()",
        "                pass\n        self._unanswered.clear()",
        "workers integration/test_faults_epochs.py",
    ),
    Mutation(
        "a slot is written to while DALI still reads it",
        "workers/arena.py",
        "if slot is not None and (reader is None or reader.inputs_released()):",
        "if slot is not None:",
        "workers/test_arena.py integration",
    ),
    Mutation(
        "the user's collate_fn draws other numbers each time",
        "loader/assembly.py",
        "                fetcher.seed_batch(batch.request)",
        "                pass",
        "integration/test_mixing.py integration/test_reproduction.py",
    ),
    Mutation(
        "what was left out of a batch is not told",
        "loader/assembly.py",
        "self._errors.add(in_flight.batch.unreadable, self._on_error if in_flight.error is None else",
        "self._errors.add((), self._on_error if in_flight.error is None else",
        "integration/test_unreadable.py",
    ),
    Mutation(
        "an error names the sample before",
        "loader/recovery.py",
        "indices[row]",
        "indices[row - 1]",
        "integration/test_unreadable.py integration/test_faults_input.py loader",
    ),
    Mutation(
        "a change of the dataset in mid-epoch is not seen",
        "loader/feed.py",
        "                self.pool.fetcher.look_again()\n",
        "",
        "integration/test_torch_contract.py integration/test_live_datasets.py loader",
    ),
    Mutation(
        "workers go on behind what they drew for a loop that was left",
        "workers/draws_ahead.py",
        "            self.void += (range(self.needed, number),)\n",
        "            pass\n",
        "integration/test_torch_contract.py",
    ),
    Mutation(
        "a worker goes back to where it was before the last request that was not needed",
        "workers/draws_ahead.py",
        "        first = next((at for at, (past, _) in enumerate(self._before)",
        "        first = next((at for at, (past, _) in reversed(list(enumerate(self._before)))",
        "workers/test_draws_ahead.py",
    ),
    # --- stopping ---
    Mutation(
        "a loop that was interrupted goes on as if nothing had been",
        "loader/iterator.py",
        "self._was_interrupted = self._pool.broken = True",
        "self._was_interrupted = False",
        "integration/test_stopping.py",
    ),
    Mutation(
        "a loop goes on with the batches of an epoch that has ended",
        "loader/iterator.py",
        "self._was_interrupted = until_begun",
        "self._was_interrupted = False",
        "integration/test_interrupted_lines.py",
    ),
    Mutation(
        "workers outlive a trainer that was killed",
        "workers/worker.py",
        "while os.getppid() == parent_pid and (trainer is None or trainer.is_alive()):",
        "while True:",
        "integration/test_processes.py integration/test_faults_loss.py",
    ),
    # --- tools ---
    Mutation(
        "the doctor takes any pixels for right",
        "tools/doctor.py",
        'if not each["error"] and each["levels_off"] <= each["bound"]]',
        'if not each["error"]]',
        "tools/test_doctor.py",
    ),
    Mutation(
        "a diagnosis takes a disk that is waited for for a loader that computes",
        "tools/diagnose/verdict.py",
        'return "disk" if not is_busy and max(loader.disk_share, figures.waiting or 0) > 0.5 else "input"',
        'return "input"',
        "tools/test_diagnose.py",
    ),
]


def plant(mutation: Mutation, package: Path) -> None:
    """
    Args:
        package: folder of the modules.

    Raises:
        ValueError: what it changes does not stand there once.
    """
    file = package / mutation.file
    text = file.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(
            f"{mutation.name!r}: {mutation.file} holds {mutation.before!r} {text.count(mutation.before)} times"
        )
    file.write_text(text.replace(mutation.before, mutation.after))


def first_failure(mutation: Mutation) -> str:
    """The first test that fails where the fault is planted; "" where none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.pyc", "build", "*.egg-info"))
        plant(mutation, copy / "proxyloader")
        tests = [str(copy / "tests" / name) for name in mutation.tests.split()]
        # In one process: of several, -x ends with another status.
        options = ["-x", "-n0", "-p", "no:cacheprovider", f"--rootdir={copy}", f"-c={copy / 'setup.cfg'}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode == TESTS_FAILED:
        return next(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    if done.returncode:
        raise RuntimeError(f"{mutation.name!r}: the tests could not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names of those to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="name them, and end")
    args = parser.parse_args()
    chosen = [each for each in MUTATIONS if not args.words or any(word in each.name for word in args.words)]
    if args.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutation, found in tqdm(zip(chosen, pool.map(first_failure, chosen)), total=len(chosen), unit="fault"):
            missed += not found
            tqdm.write(f"{'found' if found else 'NOT FOUND'}: {mutation.name}. {found}")
    print(f"{len(chosen) - missed} of {len(chosen)} faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
