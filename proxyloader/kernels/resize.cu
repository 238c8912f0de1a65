// Crop and resize, with the integers that Pillow or torch computes, and store as the output.
//
//   build_weights   for each output index of an axis: the source pixels and their integer weights
//   resample        a tile of the result: one pass into shared memory, then the other. Pillow rounds to 8 bits between
//                   them, so the order changes levels
//   store           from an image to the output, through a resize of floats if it is asked for
//   erase_output    a box of an output

#define THREADS 256
#define TILE 32  // pixels along both sides, of a warp, so that it reads a contiguous piece of a source row
#define CHUNK 96  // rows, or columns, that the first pass of a tile leaves in shared memory at a time
#define ROWS_PER_THREAD 2  // they share the loads of the weights
#define RGB 3

const int ROW_BYTES = TILE * RGB;
const int WORDS_PER_ROW = ROW_BYTES / 4;
const int WORDS_PER_THREAD = (TILE * WORDS_PER_ROW + THREADS - 1) / THREADS;
const int SHARED_WORDS = CHUNK * RGB * TILE / 4;
static_assert(CHUNK % ROWS_PER_THREAD == 0 && CHUNK % 4 == 0, "threads write groups of rows, and rows are words");

enum Filter { LANCZOS = 1, BILINEAR = 2, BICUBIC = 3, BOX = 4, HAMMING = 5 };  // as Pillow numbers them
enum Arithmetic { PILLOW = 0, TORCH = 1 };

// What build_weights leaves for an axis. The weights of neighbouring outputs are next to each other, as neighbouring
// threads read them together.
struct Table {
    int *at;
    int size;

    // Rows, behind the shift: the first source pixel of each output, their count, the weights of each tap.
    __device__ int *place(int row, int i) const { return at + 1 + row * size + i; }

    __device__ int shift() const { return __ldg(at); }
    __device__ int first(int i) const { return __ldg(place(0, i)); }
    __device__ int count(int i) const { return __ldg(place(1, i)); }
    __device__ int weight(int i, int tap) const { return __ldg(place(2 + tap, i)); }
};

// ---------------------------------------------------------------------------------------------------------- weights

const double PI = 3.14159265358979323846;
const int LARGEST_SHIFT = 32 - 8 - 2;
const int TORCH_WEIGHT_BITS = 15;  // of an int16, without its sign

__device__ double sinc(double x) { return x == 0.0 ? 1.0 : sin(x * PI) / (x * PI); }

__device__ double hamming(double x) {
    return x == 0.0 ? 1.0 : x < 1.0 ? sinc(x) * (0.54f + 0.46f * cos(x * PI)) : 0.0;
}

// Pillow and torch order the operations of the outer part differently.
__device__ double bicubic(double x, int arithmetic) {
    const double a = -0.5;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    if (x >= 2.0) return 0.0;
    if (arithmetic != PILLOW) return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
    return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
}

__device__ double filter_at(int filter, int arithmetic, double x) {
    // Box and Lanczos are not symmetric at their ends.
    if (filter == BOX) return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    if (filter == LANCZOS) return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0;
    if (filter == BILINEAR) return fmax(1.0 - fabs(x), 0.0);
    if (filter == HAMMING) return hamming(fabs(x));
    return bicubic(fabs(x), arithmetic);
}

__device__ double support_of(int filter) {
    return filter == BOX ? 0.5 : filter == LANCZOS ? 3.0 : filter == BICUBIC ? 2.0 : 1.0;
}

// Of floats, bicubic is fused as GCC fuses it.
__device__ float filter_at(int filter, int, float x) {
    const float a = -0.5f;
    x = fabsf(x);
    if (filter == BILINEAR) return fmaxf(1.0f - x, 0.0f);
    if (x < 1.0f) return fmaf(fmaf(a + 2.0f, x, -(a + 3.0f)) * x, x, 1.0f);
    return x < 2.0f ? fmaf(fmaf(fmaf(a, x, -5.0f * a), x, 8.0f * a), x, -4.0f * a) : 0.0f;
}

// The source pixels of output `index` of `to`, of a box in a crop of `from`, and where the filter stands over them.
template <class Real> struct Window {
    int first, count, filter, arithmetic;
    Real center, inverse_scale, sum;

    __device__ Window(Real box_begin, Real box_size, int from, int to, int index, int filter, int arithmetic)
        : filter(filter), arithmetic(arithmetic), sum(0) {
        const Real scale = box_size / to, widening = scale < 1 ? 1 : scale;
        const Real support = (Real)support_of(filter) * widening;
        center = box_begin + (index + (Real)0.5) * scale;
        inverse_scale = 1 / widening;
        first = max((int)(center - support + 0.5), 0);
        count = min((int)(center + support + 0.5), from) - first;
        for (int tap = 0; tap < count; ++tap) sum += filter_at_tap(tap);
    }

    __device__ Real filter_at_tap(int tap) const {
        return filter_at(filter, arithmetic, (Real)((tap + first - center + 0.5) * inverse_scale));
    }

    __device__ Real weight(int tap) const { return sum != 0 ? filter_at_tap(tap) / sum : filter_at_tap(tap); }
};

__device__ int to_fixed(double weight, int shift) {
    const double scaled = weight * (1 << shift);
    return (int)(scaled < 0 ? -0.5 + scaled : 0.5 + scaled);
}

// torch keeps as many bits of the weights as let the largest of the axis be an int16.
__device__ int torch_shift(double largest) {
    int shift = 0;
    while (shift < LARGEST_SHIFT && (int)(0.5 + largest * (2 << shift)) < (1 << TORCH_WEIGHT_BITS)) ++shift;
    return shift;
}

// Grid: (2 axes, jobs).
extern "C" __global__ void __launch_bounds__(128) build_weights(Batch batch, int first) {
    __shared__ ullong largest_bits;
    const Job job = batch.jobs[first + blockIdx.y];
    const double *n = batch.steps[job.first].numbers;
    const int which = blockIdx.x;  // 0: x, 1: y
    const Table table = {batch.pool + (which ? job.table_y : job.table_x), which ? job.height : job.width};
    const auto window_of = [&](int index) {
        const float begin = (float)n[4 + which], size = (float)n[6 + which] - begin;
        return Window<double>(begin, size, (int)n[2 + which], table.size, index, (int)n[8], (int)n[9]);
    };
    int shift = LARGEST_SHIFT;
    if (n[9] == TORCH) {
        // the bits of doubles that are not negative have the order of their values
        if (threadIdx.x == 0) largest_bits = 0;
        __syncthreads();
        for (int index = threadIdx.x; index < table.size; index += blockDim.x) {
            const auto window = window_of(index);
            double largest = 0.0;
            for (int tap = 0; tap < window.count; ++tap) largest = fmax(largest, window.weight(tap));
            atomicMax(&largest_bits, (ullong)__double_as_longlong(largest));
        }
        __syncthreads();
        shift = torch_shift(__longlong_as_double((long long)largest_bits));
    }
    if (threadIdx.x == 0) *table.at = shift;
    for (int index = threadIdx.x; index < table.size; index += blockDim.x) {
        const auto window = window_of(index);
        *table.place(0, index) = (int)n[which] + window.first;
        *table.place(1, index) = window.count;
        for (int tap = 0; tap < window.count; ++tap)
            *table.place(2 + tap, index) = to_fixed(window.weight(tap), shift);
    }
}

// -------------------------------------------------------------------------------------------------------- resampling

// What is read, with one byte per channel outside, the first in the lowest bits.
struct Source {
    const uchar *pixels;  // HWC
    int height, width, row_bytes, fill;

    __device__ const uchar *at(int x, int y) const { return pixels + (long long)y * row_bytes + x * RGB; }

    __device__ int level(int x, int y, int channel) const {
        const bool inside = x >= 0 && x < width && y >= 0 && y < height;
        return inside ? __ldg(at(x, y) + channel) : fill >> (8 * channel) & 255;
    }
};

__device__ int to_level(int sum, int shift) { return min(max(sum >> shift, 0), 255); }

__device__ bool holds(int first, int count, int size) { return first >= 0 && first + count <= size; }

struct Range { int first, last; };

struct Tile { int x, y, last_x, last_y; };  // of an output

// Four levels of a result, which are next to each other in memory.
struct Word {
    int row, place;  // in the tile

    __device__ Word(int index) : row(index / WORDS_PER_ROW), place(4 * (index % WORDS_PER_ROW)) {}
};

// Adds the taps of one output at COUNT places. `level(tap, i, channel)` is of a source pixel.
template <int UNROLL, int COUNT, class Level>
__device__ void add_taps(const Table &table, int index, int count, Level level, int (&sums)[COUNT][RGB]) {
#pragma unroll UNROLL
    for (int tap = 0; tap < count; ++tap) {
        const int weight = table.weight(index, tap);
        for (int i = 0; i < COUNT; ++i)
            for (int channel = 0; channel < RGB; ++channel) sums[i][channel] += weight * level(tap, i, channel);
    }
}

template <int COUNT, int VALUES> __device__ void start(int (&sums)[COUNT][VALUES], int shift) {
    for (int i = 0; i < COUNT * VALUES; ++i) sums[i / VALUES][i % VALUES] = 1 << (shift - 1);  // a half
}

// The usual order: the horizontal pass leaves rows of the source, as wide as the tile, in shared memory.
struct RowsFirst {
    static const bool IS_X_FIRST = true;

    __device__ static void first_pass(const Source &source, const Table &along_x, const Tile &tile, Range chunk,
                                      uchar *shared) {
        const int shift = along_x.shift();
        const int groups = (chunk.last - chunk.first) / ROWS_PER_THREAD + 1;
        for (int item = threadIdx.x; item < groups * TILE; item += THREADS) {
            const int x = item % TILE, column = tile.x + x, row = item / TILE * ROWS_PER_THREAD;
            if (column > tile.last_x) continue;
            int y[ROWS_PER_THREAD], sums[ROWS_PER_THREAD][RGB];
            start(sums, shift);
            for (int i = 0; i < ROWS_PER_THREAD; ++i)
                y[i] = min(chunk.first + row + i, chunk.last);  // a group may reach below; nobody reads that
            const int first = along_x.first(column), count = along_x.count(column);
            if (holds(first, count, source.width) && y[0] >= 0 && y[ROWS_PER_THREAD - 1] < source.height) {
                const uchar *lines[ROWS_PER_THREAD];
                for (int i = 0; i < ROWS_PER_THREAD; ++i) lines[i] = source.at(first, y[i]);
                add_taps<2>(along_x, column, count, [&](int tap, int i, int channel) {
                    return __ldg(lines[i] + tap * RGB + channel);
                }, sums);
            } else {
                add_taps<1>(along_x, column, count, [&](int tap, int i, int channel) {
                    return source.level(first + tap, y[i], channel);
                }, sums);
            }
            for (int i = 0; i < ROWS_PER_THREAD; ++i)
                for (int channel = 0; channel < RGB; ++channel)
                    shared[(row + i) * ROW_BYTES + x * RGB + channel] = to_level(sums[i][channel], shift);
        }
    }

    __device__ static void second_pass(const Table &along_y, const Tile &tile, Word word, Range chunk,
                                       const uchar *shared, int (&sums)[4]) {
        const int y = tile.y + word.row, first = along_y.first(y);
        const int end = min(first + along_y.count(y), chunk.last + 1);
#pragma unroll 2
        for (int row = max(first, chunk.first); row < end; ++row) {
            const int weight = along_y.weight(y, row - first);
            const uint levels = *(const uint *)(shared + (row - chunk.first) * ROW_BYTES + word.place);
            for (int i = 0; i < 4; ++i) sums[i] += weight * (int)(levels >> (8 * i) & 255);
        }
    }
};

// The other order: the vertical pass leaves columns of the source, as high as the tile, in shared memory.
struct ColumnsFirst {
    static const bool IS_X_FIRST = false;

    __device__ static void first_pass(const Source &source, const Table &along_y, const Tile &tile, Range chunk,
                                      uchar *shared) {
        const int shift = along_y.shift();
        for (int item = threadIdx.x; item < (tile.last_y - tile.y + 1) * CHUNK; item += THREADS) {
            const int x = chunk.first + item % CHUNK, y = tile.y + item / CHUNK;
            if (x > chunk.last) continue;
            const int first = along_y.first(y), count = along_y.count(y);
            int sums[1][RGB];
            start(sums, shift);
            if (x >= 0 && x < source.width && holds(first, count, source.height)) {
                const uchar *pixel = source.at(x, first);
                add_taps<2>(along_y, y, count, [&](int tap, int, int channel) {
                    return __ldg(pixel + (long long)tap * source.row_bytes + channel);
                }, sums);
            } else {
                add_taps<1>(along_y, y, count, [&](int tap, int, int channel) {
                    return source.level(x, first + tap, channel);
                }, sums);
            }
            for (int channel = 0; channel < RGB; ++channel)
                shared[item * RGB + channel] = to_level(sums[0][channel], shift);
        }
    }

    __device__ static void second_pass(const Table &along_x, const Tile &tile, Word word, Range chunk,
                                       const uchar *shared, int (&sums)[4]) {
        for (int i = 0; i < 4; ++i) {
            // a word may reach beyond; nobody reads that
            const int x = min(tile.x + (word.place + i) / RGB, tile.last_x);
            const int first = along_x.first(x);
            const int end = min(first + along_x.count(x), chunk.last + 1);
            const uchar *row = shared + word.row * CHUNK * RGB + (word.place + i) % RGB;
#pragma unroll 1
            for (int column = max(first, chunk.first); column < end; ++column)
                sums[i] += along_x.weight(x, column - first) * row[(column - chunk.first) * RGB];
        }
    }
};

template <class Passes> __device__ void resample_tile(const Batch &batch, const Job &job, int fill, uint *shared) {
    const int tiles_x = (job.width + TILE - 1) / TILE;
    const int left = blockIdx.x % tiles_x * TILE, top = blockIdx.x / tiles_x * TILE;
    if (top >= job.height) return;
    const Tile tile = {left, top, min(left + TILE, job.width) - 1, min(top + TILE, job.height) - 1};
    const Source source = {job.source, job.source_height, job.source_width, RGB * job.source_width, fill};
    const Table along_x = {batch.pool + job.table_x, job.width}, along_y = {batch.pool + job.table_y, job.height};
    const Table &one = Passes::IS_X_FIRST ? along_x : along_y, &other = Passes::IS_X_FIRST ? along_y : along_x;
    const int begin = Passes::IS_X_FIRST ? tile.y : tile.x, end = Passes::IS_X_FIRST ? tile.last_y : tile.last_x;
    const Range needed = {other.first(begin), other.first(end) + other.count(end) - 1};  // source of the tile
    const int shift = other.shift();

    int sums[WORDS_PER_THREAD][4];
    start(sums, shift);
    for (int first = needed.first; first <= needed.last; first += CHUNK) {
        const Range chunk = {first, min(first + CHUNK - 1, needed.last)};
        Passes::first_pass(source, one, tile, chunk, (uchar *)shared);
        __syncthreads();
        for (int i = 0; i < WORDS_PER_THREAD; ++i) {
            const Word word(threadIdx.x + i * THREADS);
            if (tile.y + word.row <= tile.last_y)
                Passes::second_pass(other, tile, word, chunk, (const uchar *)shared, sums[i]);
        }
        __syncthreads();
    }

    const int row_bytes = (tile.last_x - tile.x + 1) * RGB;
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const Word word(threadIdx.x + i * THREADS);
        const int y = tile.y + word.row;
        if (y > tile.last_y) continue;
        uchar *to = job.target + RGB * ((size_t)y * job.width + tile.x) + word.place;
        for (int k = 0; k < 4; ++k)
            if (word.place + k < row_bytes) to[k] = to_level(sums[i][k], shift);
    }
}

// Grid: (tiles of the largest result, jobs).
extern "C" __global__ void __launch_bounds__(THREADS, 4) resample(Batch batch, int first) {
    __shared__ uint shared[SHARED_WORDS];
    const Job job = batch.jobs[first + blockIdx.y];
    const double *n = batch.steps[job.first].numbers;
    if (n[11] != 0) resample_tile<ColumnsFirst>(batch, job, (int)n[10], shared);
    else resample_tile<RowsFirst>(batch, job, (int)n[10], shared);
}

// ----------------------------------------------------------------------------------------- resizes of float tensors

struct Colour { float r, g, b; };

__device__ float summed(float sum, float weight, float v, bool is_fused) {
    return is_fused ? fmaf(weight, v, sum) : sum + weight * v;
}

// Unless torch's build fuses all products with their sums, GCC has vectorised its loop behind the first product: of
// each four products, none is fused.
template <class Value> __device__ Colour tensor_mean(const Window<float> &taps, bool is_all_fused, Value value) {
    Colour sum = {0, 0, 0};  // the first product has nothing to be added to
    for (int tap = 0; tap < taps.count; tap++) {
        const float w = taps.weight(tap);
        const bool is_fused = is_all_fused || tap > (taps.count - 1) / 4 * 4;
        const Colour v = value(tap);
        sum = {summed(sum.r, w, v.r, is_fused), summed(sum.g, w, v.g, is_fused), summed(sum.b, w, v.b, is_fused)};
    }
    return sum;
}

// interpolate with antialias of a tensor of floats, in the sums that torch computes in one thread.
struct FloatResize {
    int height, width, filter;
    bool is_all_fused;  // whether torch fuses all products

    // `value(level)` is a source value.
    template <class Value> __device__ Colour at(const Job &job, int x, int y, Value value) const {
        const Window<float> across(0, job.source_width, job.source_width, width, x, filter, TORCH);
        const Window<float> down(0, job.source_height, job.source_height, height, y, filter, TORCH);
        return tensor_mean(down, is_all_fused, [&](int row) {
            return tensor_mean(across, is_all_fused, [&](int column) {
                const Pixel p = pixel_at(job, across.first + column, down.first + row);
                return Colour{value(p.r), value(p.g), value(p.b)};
            });
        });
    }
};

// ------------------------------------------------------------------------------------------------------------ output

__device__ unsigned short bfloat16_bits(float value) {
    const uint bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

#ifndef EMULATED
__device__ unsigned short float16_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// Channel `c` of pixel number `at` of an output.
__device__ void put(const Batch &batch, const Job &job, int at, int c, int channels, float value) {
    const size_t i = batch.is_planar ? (size_t)c * job.height * job.width + at : (size_t)channels * at + c;
    switch (batch.format) {
        case UINT8: job.target[i] = (uchar)value; break;
        case FLOAT16: ((unsigned short *)job.target)[i] = float16_bits(value); break;
        case BFLOAT16: ((unsigned short *)job.target)[i] = bfloat16_bits(value); break;
        default: ((float *)job.target)[i] = value;
    }
}

// ToTensor divides levels by 255 (1), v2's ToDtype multiplies by 1 / 255 (2).
__device__ float scaled(int level, int how) {
    return how == 0 ? level : how == 1 ? level / 255.0f : level * (1.0f / 255.0f);
}

// Of a resize of floats, the output is what a crop and flips leave: pixel x is pixel n[12] + n[13] * x. A thread has
// one pixel.
extern "C" __global__ void store(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= job.height * job.width) return;
    const Step &step = batch.steps[job.first];
    const double *n = step.numbers;
    const int channels = (int)n[0], how = (int)n[1];
    Colour colour = {0, 0, 0};  // outside
    if (step.code == STORE) {
        const Pixel p = pixel_of(job.source + 3 * (size_t)at);
        colour = {scaled(p.r, how), scaled(p.g, how), scaled(p.b, how)};
    } else {
        const FloatResize to = {(int)n[10], (int)n[11], (int)n[8], n[9] != 0};
        const int x = (int)n[12] + (int)n[13] * (at % job.width), y = (int)n[14] + (int)n[15] * (at / job.width);
        if (x >= 0 && x < to.width && y >= 0 && y < to.height)
            colour = to.at(job, x, y, [&](int level) { return scaled(level, how); });
    }
    const float values[3] = {colour.r, colour.g, colour.b};
    for (int c = 0; c < channels; c++)
        put(batch, job, at, c, channels, (values[c] - (float)n[2 + c]) / (float)n[5 + c]);
}

// A box of an output that was stored before. A thread has one pixel. Grid: (parts of the largest image, jobs).
extern "C" __global__ void erase_output(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const Step &step = batch.steps[job.first];
    const double *n = step.numbers;
    const int width = (int)n[2], i = blockIdx.x * blockDim.x + threadIdx.x, channels = (int)n[8];
    if (i >= width * (int)n[3]) return;
    const int at = ((int)n[1] + i / width) * job.width + (int)n[0] + i % width;
    for (int c = 0; c < channels; c++) {
        const float value = n[4] != 0 ? batch.extras[step.extra + channels * i + c] : (float)n[5 + c];
        put(batch, job, at, c, channels, value);
    }
}
