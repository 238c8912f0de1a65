// Enough of CUDA for g++ to compile the kernels: blocks run one after another, the threads of a block in turns.
//
// Each thread of a block is a fiber. It runs until __syncthreads and then lets the next one run, so what threads share
// between two barriers is seen as on a GPU, in one fixed order.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

using std::max;
using std::min;

#define EMULATED
#define __global__
#define __device__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local  // a launch stays in one thread of the host, so these are one for a block

struct Index { unsigned x, y, z; };

static Index blockIdx, threadIdx, blockDim;
thread_local unsigned shared_words[256 * 1024 / 4];

template <class T> static T atomicAdd(T *at, T value) { T old = *at; *at += value; return old; }
template <class T> static T atomicMax(T *at, T value) { T old = *at; *at = max(old, value); return old; }
template <class T> static T __ldg(const T *at) { return *at; }

template <class To, class From> static To same_bits(From value) {
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}

static long long __double_as_longlong(double value) { return same_bits<long long>(value); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }

// Rounded to nearest even: by the addition of bits, which carries into the exponent, or of what is too small for one.
static unsigned short float16_bits(float value) {
    const float size = std::fabs(value);
    const unsigned bits = same_bits<unsigned>(size);
    const unsigned normal = (bits + 0xFFF + (bits >> 13 & 1)) >> 13;
    const unsigned rounded = size < 0x1p-14f ? (unsigned)std::nearbyint(size * 0x1p24f) : normal - (112 << 10);
    return (std::signbit(value) ? 0x8000 : 0) | std::min(rounded, 0x7C00u);
}

static const unsigned MOST_THREADS = 256;
static jmp_buf scheduler, fibers[MOST_THREADS];
static bool is_started[MOST_THREADS], is_done[MOST_THREADS];
static unsigned running;

static void let_others_run() {
    if (!_setjmp(fibers[running])) _longjmp(scheduler, 1);
}

static void __syncthreads() { let_others_run(); }

#include SOURCE

static void (*kernel)(Batch, int);
static Batch batch;
static int first;

static void live() {
    for (;;) {
        kernel(batch, first);
        is_done[running] = true;
        let_others_run();
    }
}

static void resume() {
    static char stacks[MOST_THREADS][64 * 1024];
    static ucontext_t context;
    if (_setjmp(scheduler)) return;
    if (is_started[running]) _longjmp(fibers[running], 1);
    is_started[running] = true;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[running], context.uc_stack.ss_size = sizeof stacks[running];
    makecontext(&context, live, 0);
    setcontext(&context);
}

static void run_block() {
    std::fill(is_done, is_done + blockDim.x, false);
    for (bool is_any_left = true; is_any_left;) {
        is_any_left = false;
        for (unsigned i = 0; i < blockDim.x; i++) {
            // every other block backwards: where a barrier is missing, results change
            running = threadIdx.x = blockIdx.x % 2 ? blockDim.x - 1 - i : i;
            if (!is_done[running]) resume();
            is_any_left |= !is_done[running];
        }
    }
}

// Returns whether a GPU would have room for the threads and for the shared memory.
extern "C" bool launch(void *function, unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared_bytes,
                       const Batch *given, int first_job) {
    if (threads > MOST_THREADS || shared_bytes > 227 * 1024) return false;
    kernel = (void (*)(Batch, int))function, batch = *given, first = first_job, blockDim = {threads, 1, 1};
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            // what a block before left there must not help
            std::fill(shared_words, shared_words + (shared_bytes + 3) / 4, 0xA5A5A5A5u);
            run_block();
        }
    }
    return true;
}
