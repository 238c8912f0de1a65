"""Faults that the default run of the tests must find: plants one after the other in a copy, and runs the tests on it.

    python -m tests.mutations                  # all; some twenty minutes on two cores
    python -m tests.mutations "a label" crop   # those whose names hold one of these words
    python -m tests.mutations --list

A fault is found where a test fails. Each names the test files that should find it. Exit status 1: one was not found.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
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
        function: in which it is, such as ``Class.method``; "" for the file outside of its functions.
        before: code that the function holds once, as ``ast.unparse`` writes it.
        after: the code in its place.
        tests: files under tests/, or parts of one, of which one at least must fail.
    """

    name: str
    file: str
    function: str
    before: str
    after: str
    tests: str

    @classmethod
    def parsed(cls, name: str, edit: str, tests: str) -> Mutation:
        """Of its three lines in ``FAULTS``."""
        place, _, code = edit.strip().partition(" | ")
        before, _, after = code.partition("=>")
        return cls(name, *place.split(":"), before.strip(), after.strip(), tests.strip())


# What is wrong; file:function | before => after; tests.
FAULTS = """\
# transforms
a centred crop is one pixel off
    transforms/geometry.py:_center_offset | / 2.0) => / 2.0) + (available > wanted)
    transforms/test_geometry.py
a random crop forgets its padding above
    transforms/geometry.py:random_crop | i - top => i
    transforms/test_geometry.py
a vertical flip is a horizontal one
    dali/build.py:Graph.add | {'horizontal': 0, 'vertical': wanted} => {'horizontal': wanted}
    dali/test_build.py
the rows of a nearest resize are counted as its columns
    transforms/resize.py:nearest_pixels | _pillow_nearest(rows, new_size[0]) => _pillow_nearest(rows, new_size[1])
    transforms/test_resize.py
brightness is contrast in what is automatic
    transforms/auto_augment.py:_branches | name.lower(), *how => name.lower().replace('brightness', 'contrast'), *how
    transforms/test_container.py
a chain of operations loses its last one
    transforms/auto_augment.py:automatic | chains[0] if chains => chains[0][:-1] if chains
    transforms/test_container.py
a transform acts with one minus its probability
    transforms/registry.py:at_random | bernoulli(p, closed) => not bernoulli(p, closed)
    transforms/test_container.py
the erased box has its sides exchanged
    transforms/augment.py:random_erasing | height, width, *fill) => width, height, *fill)
    transforms/test_augment.py
colours are adjusted in one order always
    transforms/color.py:color_jitter | in_thread.numbers.permutation(4) => sorted(in_thread.numbers.permutation(4))
    transforms/test_color.py
levels are divided by 256
    dali/build.py:Graph.add | 255.0 if step.scale => 256.0 if step.scale
    dali/test_build.py integration/test_same_batches.py
a plan that has no kernel is sent to the kernels
    kernels/operations.py:find_obstacle | return get_missing_kernel(plan) => return ''
    loader/test_what_runs.py
images of different plans take turns in the wrong order
    kernels/operations.py:build_programs | np.array(numbers) => np.array(numbers[::-1])
    loader/test_kernels_road.py
a step that DALI lacks is sent to DALI
    kernels/operations.py:find_obstacle | if step.needs_kernels] => if not step]
    loader/test_what_runs.py loader/test_backend.py
# reading
a damaged JPEG passes for a whole one
    data/jpeg.py:find_damage | return str(error) => return ''
    data/test_jpeg.py workers/test_scan_checks.py
the damaged ones are remembered as sound
    workers/fetch.py:checking.__exit__ | and (self._damaged == checks.damaged) =>
    workers/test_scan_checks.py integration/test_caught_errors.py
a lost block in a JPEG is not looked for
    data/jpeg.py:is_sound | data.find(ZERO_RUN, header.first_scan) < 0 => True
    data/test_jpeg.py
an image that Pillow raises an error for is decoded late
    data/jpeg.py:_accepts | consumed < 0 and code >= 0 => True
    integration/test_hostile_jpegs.py
a JPEG in RGB is taken for one in YCbCr
    data/jpeg.py:read_jpeg_header | adobe_transform != 0 => adobe_transform != 3
    integration/test_hostile_jpegs.py data/test_jpeg.py
a full disk is taken for a bad file
    data/bad_samples.py:is_sample_fault | not is_system_fault(error) => True
    integration/test_unreadable.py
a sample is replaced by itself
    workers/fetch.py:Fetcher.next_readable | (first + step) % size => (first + step - 1) % size
    integration/test_unreadable.py
an image that was changed is handed on as its file
    data/lazy_image.py:hook_pillow | self.__dict__.pop(_IMAGE, None) => pass
    data/test_lazy_image.py
# tensors and transforms that are met late
a list that changes after a recorded call changes what is repeated
    data/pillow_calls.py:frozen | list(map(frozen, value)) => value
    kernels/test_pillow_calls.py
an image pasted through a mask is recorded as a whole
    data/pillow_calls.py:_paste | mask is not None => False
    kernels/test_pillow_calls.py
an image that changes behind its enhancer is enhanced as it was
    data/pillow_calls.py:_enhance | find_undecoded(made.image) is not find_undecoded(before) => False
    kernels/test_pillow_calls.py
channels of two images are merged as those of one
    data/pillow_calls.py:_merge | call.of.image is not of.image or => False and
    kernels/test_pillow_calls.py
a crop of a recorded tensor is recorded as a copy
    data/tensor_calls.py:_apply | if found.is_view else => if False else
    kernels/test_tensor_calls.py
a tensor that others share is changed alone
    data/tensor_calls.py:_apply | not is_unshared(image) => False
    kernels/test_tensor_calls.py
an array that was changed is handed on as its file
    data/lazy_decoding.py:find_decoded | np.array_equal(decoded, known.pixels) => True
    kernels/test_tensor_calls.py
values that are asked for are drawn anew
    data/transformed.py:_run | states is None => True
    integration/test_random_programs.py
an assignment to a recorded tensor changes those that were recorded before
    data/recorded.py:execute | args[0] if overwrite else args[0].clone() => args[0]
    data/test_lazy_tensor.py
operations are recorded without end
    data/recorded.py:can_record | each.depth >= MAX_DEPTH => False
    data/test_lazy_tensor.py
data that are put in place of a tensor's own are lost
    data/lazy_tensor.py:LazyTensor.__torch_function__ | function == SET_DATA or =>
    data/test_lazy_tensor.py
a tensor that is decoded late is looked up as a class of ours
    data/lazy_tensor.py:StockType.__eq__ | or cls.stock is other =>
    integration/test_called_transforms.py
masks are filled with 0 outside of the original
    data/lazy_mask.py:Selection.without_outside | value=self.fill => value=0
    loader/test_masks.py
a mask does not see what its crop is set to
    data/lazy_mask.py:_apply | if not is_view: => if True:
    loader/test_masks.py
pixels of a mask that change later are sent
    data/lazy_mask.py:_apply | .clone(memory_format=torch.contiguous_format) => .contiguous()
    loader/test_masks.py
a default dtype that changes later is not seen
    data/called_transforms.py:_has_other_dtype | (dtype := torch.get_default_dtype()) is torch.float32 => True
    integration/test_called_transforms.py
pixels that a failed batch used are another loader's
    workers/worker.py:PackedDataset._pack | self._packer.begin_batch() => pass
    loader/test_backend.py
CUDA decodes large photographs where there are few cores, too
    dali/build.py:PipelineOptions.for_files_of | and cores >= MANY_CORES =>
    dali/test_build.py
a missing file is an error of no class that torchvision's loader raises
    data/encoded_image.py:_read_error | , kind=BY_CAUSE.get(type(error), ImageError) =>
    integration/test_caught_errors.py
a translated transform that its dataset changes stays as it was
    transforms/chain.py:Chain.along | found[0].is_current() => True
    integration/test_called_transforms.py
an image is made by the settings that its transform has later
    transforms/chain.py:Chain._extend | copy.deepcopy(transform) => transform
    integration/test_called_transforms.py
a change in place does not reach the views of a tensor
    data/lazy_tensor.py:is_unshared | all((other is tensor for other in _aliases(tensor))) => True
    data/test_lazy_tensor.py integration/test_random_programs.py
a transform that was changed is taken for what it was
    transforms/chain.py:settings_of | has_tensors or (kind not in RULES and kind not in CONTAINERS) => True
    transforms/test_chain.py
# order
two shards overlap by a sample
    data/sharded_sampler.py:_range | (shard + 1) * samples // shards => -(-(shard + 1) * samples // shards)
    data/test_sharded_sampler.py integration/test_sharded_loader.py
a shard that is filled up repeats its first sample
    data/sharded_sampler.py:ShardedSampler.indices | part[-1:] => part[:1]
    data/test_sharded_sampler.py integration/test_sharded_loader.py
another number of processes takes up what the first shard left, once for each
    data/sharded_sampler.py:ShardedSampler.indices | order[first:end] => order[ranges[0][0]:ranges[0][1]]
    data/test_sharded_sampler.py integration/test_sharded_loader.py
a dataset that catches the errors of damaged files does not meet them
    data/encoded_image.py:EncodedImage.from_jpeg | is_sound(data[:scans.end], header, scans) => True
    integration/test_caught_errors.py
where processes train together, a skipped batch is missing in one of them
    workers/fetch.py:Fetcher.__call__ | and unreadable: => and ():
    integration/test_unreadable.py
the last batch, a smaller one, is lost
    workers/request_sampler.py:RequestSampler._remaining | self.sampler.drop_last => True
    integration/test_torch_contract.py
the first request is drawn twice from a sampler
    workers/request_sampler.py:RequestSampler._issue | (remaining, => (iter(self.sampler),
    integration/test_torch_contract.py workers/test_request_sampler.py
all epochs have the order of the first
    loader/dataloader.py:DataLoader.__iter__ | loader_state.epoch + 1 => loader_state.epoch
    integration/test_reproduction.py
a batch of a Subset is read from other places of its folder
    workers/fetch.py:_resolve_subsets | [dataset.indices[index] for index in indices] => indices
    workers/test_fetch_folder.py
a batch whose transform fails leaves other numbers to the next one
    workers/fetch.py:Fetcher._fetch_folder | set_rng_states(states) => pass
    workers/test_fetch_folder.py
a folder whose dataset changes the class of a sample is read without it
    workers/fetch.py:_is_stock_folder | (folder.target_transform is None) and =>
    workers/test_fetch_folder.py
numbers that were computed from the generator's state are drawn again
    transforms/random_numbers.py:NumbersFromState.write | torch.default_generator.set_state(self._state) => pass
    transforms/test_random_numbers.py
trials of RandomIoUCrop draw too few numbers
    transforms/boxes.py:_draw_crops | 2 * each + 4 => 2 * each + 2
    transforms/test_boxes.py
boxes that reach the right edge are removed
    transforms/boxes.py:find_valid | 0 <= right <= width => 0 <= right < width
    transforms/test_boxes.py
the contrast of a photometric distortion never comes last
    transforms/color.py:photometric_distort | (0, 2, 3, 1) => (0, 1, 2, 3)
    transforms/test_color.py
all samples of an epoch are given the same random numbers
    workers/fetch.py:Fetcher._seed_sample | epoch, index) => epoch)
    integration/test_reproduction.py
a resumed epoch begins a batch too early
    workers/request_sampler.py:RequestSampler.record_return | += self => += (loader_state.samples > 0) * self
    integration/test_reproduction.py
a resumed stream begins at its start
    loader/feed.py:Feed.__init__ | loader_state.batches if => 0 if
    integration/test_reproduction.py
a state of another seed is taken
    workers/loader_state.py:_check_saved | state['seed'] != seed => state['seed'] == 'another'
    workers/test_request_sampler.py
Ctrl-C while DALI is imported leaves a part of it, with which no loader works
    dali/api.py: | with defer_interrupts(): => if defer_interrupts:
    test_lifetime.py
# the way of a batch
what a dataset keeps of a batch stays in the memory of the next one
    data/batch_memory.py:BatchMemory.end | count > baseline + 2 => count > 99
    workers/test_slots.py integration/test_live_datasets.py
a child that a dataset forks reads files into the batch of its parent
    data/hooks.py: | after_in_child=_reset_in_child => after_in_child=int
    integration/test_live_datasets.py
files of one size are taken to follow each other where they were read
    workers/packing.py:_pack_input | array.shape == arrays[0].shape => array.ndim > 1 and array.shape == arrays[0].shape
    workers/test_slots.py
a loader in a dataset takes files of the outer one's batch for its own
    workers/packing.py:_Layout.add_file | if self._in_slot else None =>
    integration/test_live_datasets.py
behind a small first batch the engines decode a few images of each batch, and CUDA the others
    dali/plan_server.py:PlanServer._prepare | len(files) <= self._fits_images => self._fits_images
    dali/test_build.py
the images of a batch are turned round, and its labels are not
    workers/packing.py:_ContentPickler._assign_batch | .append(list(calls)) => .append(list(calls)[::-1])
    integration/test_same_batches.py integration/test_faults_structure.py
an image that is used twice takes the next one's place
    workers/packing.py:_ContentPickler._assign_row | len(self.runs[run][0])) => len(self.runs[run][0]) - 1)
    integration/test_faults_structure.py
the newest batch under way is handed out first
    loader/feed.py:Feed.next | self._in_flight.popleft() => self._in_flight.pop()
    integration/test_same_batches.py integration/test_faults_epochs.py
a slot is lost where a loop is left early
    loader/feed.py:Feed.close | self.release(self._in_flight.popleft()) => self._in_flight.popleft()
    integration/test_processes.py integration/test_faults_epochs.py
a slot is lost with a batch that nobody asks for any more
    workers/request_sampler.py:RequestSampler.discard_pending | self.arena.release(request.slot) => pass
    workers/test_request_sampler.py
a batch gets the images of another one in the same run
    dali/run_queue.py:DaliRun.__init__ | self.size += part.size => self.size = part.size
    loader/test_small_batches.py
a slot is written to while DALI still reads it
    workers/arena.py:Arena.release | and all((pipeline_run.inputs_released() for pipeline_run in readers)) =>
    workers/test_slots.py integration
the user's collate_fn draws other numbers each time
    loader/assembly.py:BatchAssembler._collate | fetcher.seed_batch(batch.request) => pass
    integration/test_same_batches.py integration/test_reproduction.py
what was left out of a batch is not told
    loader/assembly.py:BatchAssembler.assemble | batch.unreadable => ()
    integration/test_unreadable.py
an error names the sample before
    loader/assembly.py:BatchAssembler._handle_failures | index=indices[k] => index=indices[k - 1]
    integration/test_unreadable.py integration/test_faults_input.py loader
workers draw for more batches than torch requests in advance
    loader/feed.py:Feed._receive | is_ahead and self.pool.delays_requests => False
    integration/test_torch_contract.py
# stopping
a loop that was interrupted goes on as if nothing had been
    loader/iterator.py:LoaderIterator.__next__ | self._pool.broken = True => False
    integration/test_processes.py
a loop goes on with the batches of an epoch that has ended
    loader/iterator.py:LoaderIterator.close | self._was_interrupted = invalidate => self._was_interrupted = False
    integration/test_interrupted_lines.py
workers outlive a trainer that was killed
    workers/worker.py:_exit_with_parent | while os.getppid() == parent_pid and => while True or
    integration/test_processes.py
# tools
the doctor takes any pixels for right
    tools/doctor.py:decoders | and fact['levels_off'] <= fact['bound'] =>
    tools/test_doctor.py
a diagnosis takes a disk that is waited for for a loader that computes
    tools/diagnose.py:find_bound | or (figures.waiting or 0) < 0.5 => or True
    tools/test_diagnose.py
"""

_LINES = [line for line in FAULTS.splitlines() if not line.startswith("#")]
MUTATIONS = [Mutation.parsed(*_LINES[first : first + 3]) for first in range(0, len(_LINES), 3)]


def plant(mutation: Mutation, package: Path) -> None:
    """
    Args:
        package: folder of the modules.

    Raises:
        ValueError: what it changes does not stand there once.
    """
    file = package / mutation.file
    source = file.read_text()
    node: ast.AST = ast.parse(source)
    for name in filter(None, mutation.function.split(".")):
        node = next(each for each in ast.walk(node) if getattr(each, "name", None) == name)
    code = ast.unparse(node)
    if code.count(mutation.before) != 1:
        times = f"{code.count(mutation.before)} times"
        raise ValueError(f"{mutation.name!r}: {mutation.file}:{mutation.function} holds {mutation.before!r} {times}")
    code, lines = code.replace(mutation.before, mutation.after), source.splitlines()
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        first = min([node, *node.decorator_list], key=lambda each: each.lineno).lineno - 1
        lines[first : node.end_lineno] = [textwrap.indent(code, " " * node.col_offset)]
        code = "\n".join(lines) + "\n"
    file.write_text(code)


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
