// Crop, resize, flip and normalise, with the integers that Pillow or torch computes, and store as the output.
//
//   build_weights       for each output index of an axis: the source pixels and their integer weights
//   resample_rows       a tile of the result: the horizontal pass into shared memory, then the vertical one
//   resample_columns    the other order. Pillow rounds to 8 bits between the passes, so the order changes levels
//   ..._store           the same, from the sums of the second pass to the output
//   store               from an image to the output
//   store_resized       the same, through a resize of floats
//
// Options of the compiler (-D): PLANAR (0: HWC, 1: CHW), OUTPUT_BITS (8: uint8, 16: float16 or bfloat16,
// 32: float32), BFLOAT (1: bfloat16).

#define THREADS 256
#define TILE_X 32  // of a warp, so that it reads a contiguous piece of a source row
#define TILE_Y 32
#define CHUNK 96  // rows, or columns, that the first pass of a tile leaves in shared memory at a time
#define ROWS_PER_THREAD 2  // they share the loads of the weights
#define CHANNELS 3

const int ROW_BYTES = TILE_X * CHANNELS;
const int WORDS_PER_ROW = ROW_BYTES / 4;
const int WORDS_PER_THREAD = (TILE_Y * WORDS_PER_ROW + THREADS - 1) / THREADS;
const int SHARED_WORDS = CHUNK * CHANNELS * (TILE_X > TILE_Y ? TILE_X : TILE_Y) / 4;
static_assert(CHUNK % ROWS_PER_THREAD == 0 && CHUNK % 4 == 0, "threads write groups of rows, and rows are words");

enum Filter { LANCZOS = 1, BILINEAR = 2, BICUBIC = 3, BOX = 4, HAMMING = 5 };  // as Pillow numbers them
enum Arithmetic { PILLOW = 0, TORCH = 1 };

// One axis of a resize.
struct Axis {
    int crop_begin, crop_size;  // in the image; may reach outside
    float box_begin, box_end;   // in the crop
    int output_size, flip, filter, arithmetic;

    __device__ Axis(const Job &job, const double *n, int which)  // 0: x, 1: y
        : crop_begin((int)n[which]), crop_size((int)n[2 + which]), box_begin((float)n[4 + which]),
          box_end((float)n[6 + which]), output_size(which ? job.height : job.width), flip((int)n[8 + which]),
          filter((int)n[10]), arithmetic((int)n[11]) {}
};

struct Source {
    const uchar *pixels;  // HWC
    int height, width, row_bytes;
    int fill;  // a byte per channel, the first in the lowest bits
};

// What build_weights leaves for an axis. The weights of neighbouring outputs are next to each other, as neighbouring
// threads read them together.
struct Table {
    int *at;
    int size;

    __device__ int *shift_at() const { return at; }
    __device__ int *first_at(int i) const { return at + 1 + i; }
    __device__ int *count_at(int i) const { return at + 1 + size + i; }
    __device__ int *weight_at(int i, int tap) const { return at + 1 + (2 + tap) * size + i; }

    __device__ int shift() const { return __ldg(shift_at()); }
    __device__ int first(int i) const { return __ldg(first_at(i)); }
    __device__ int count(int i) const { return __ldg(count_at(i)); }
    __device__ int weight(int i, int tap) const { return __ldg(weight_at(i, tap)); }
};

// ---------------------------------------------------------------------------------------------------------- weights

const double PI = 3.14159265358979323846;
const int LARGEST_SHIFT = 32 - 8 - 2;
const int TORCH_WEIGHT_BITS = 15;  // of an int16, without its sign

__device__ double sinc(double x) { return x == 0.0 ? 1.0 : sin(x * PI) / (x * PI); }

__device__ double hamming(double x) {
    if (x == 0.0) return 1.0;
    return x < 1.0 ? sinc(x) * (0.54f + 0.46f * cos(x * PI)) : 0.0;
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

// The source pixels of one output, in the crop, and where the filter stands over them.
struct Window {
    int first, count, filter, arithmetic;
    double center, inverse_scale, sum;

    __device__ Window(const Axis &axis, int index)
        : filter(axis.filter), arithmetic(axis.arithmetic), sum(0.0) {
        const double scale = (double)(axis.box_end - axis.box_begin) / axis.output_size;
        const double widening = scale < 1.0 ? 1.0 : scale;
        const double support = support_of(filter) * widening;
        center = axis.box_begin + (index + 0.5) * scale;
        inverse_scale = 1.0 / widening;
        first = max((int)(center - support + 0.5), 0);
        count = min((int)(center + support + 0.5), axis.crop_size) - first;
        for (int tap = 0; tap < count; ++tap) sum += filter_at_tap(tap);
    }

    __device__ double filter_at_tap(int tap) const {
        return filter_at(filter, arithmetic, (tap + first - center + 0.5) * inverse_scale);
    }

    __device__ double weight(int tap) const { return sum != 0.0 ? filter_at_tap(tap) / sum : filter_at_tap(tap); }
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

// The bits of doubles that are not negative have the order of their values.
__device__ int shift_of(const Axis &axis, ullong *largest_bits) {
    if (axis.arithmetic == PILLOW) return LARGEST_SHIFT;
    if (threadIdx.x == 0) *largest_bits = 0;
    __syncthreads();
    for (int index = threadIdx.x; index < axis.output_size; index += blockDim.x) {
        const Window window(axis, index);
        double largest = 0.0;
        for (int tap = 0; tap < window.count; ++tap) largest = fmax(largest, window.weight(tap));
        atomicMax(largest_bits, (ullong)__double_as_longlong(largest));
    }
    __syncthreads();
    return torch_shift(__longlong_as_double((long long)*largest_bits));
}

// Grid: (2 axes, jobs).
extern "C" __global__ void __launch_bounds__(128) build_weights(Batch batch, int first) {
    __shared__ ullong largest_bits;
    const Job job = batch.jobs[first + blockIdx.y];
    const Axis axis(job, batch.steps[job.first].numbers, blockIdx.x);
    const Table table = {batch.pool + (blockIdx.x ? job.table_y : job.table_x), axis.output_size};
    const int shift = shift_of(axis, &largest_bits);
    if (threadIdx.x == 0) *table.shift_at() = shift;
    for (int index = threadIdx.x; index < axis.output_size; index += blockDim.x) {
        const Window window(axis, index);
        const int at = axis.flip ? axis.output_size - 1 - index : index;
        *table.first_at(at) = axis.crop_begin + window.first;
        *table.count_at(at) = window.count;
        for (int tap = 0; tap < window.count; ++tap) *table.weight_at(at, tap) = to_fixed(window.weight(tap), shift);
    }
}

// -------------------------------------------------------------------------------------------------------- resampling

__device__ int to_level(int sum, int shift) { return min(max(sum >> shift, 0), 255); }

__device__ bool holds(int first, int count, int size) { return first >= 0 && first + count <= size; }

__device__ const uchar *pixel_at(const Source &source, int x, int y) {
    return source.pixels + (long long)y * source.row_bytes + x * CHANNELS;
}

__device__ int level_or_fill(const Source &source, int x, int y, int channel) {
    const bool inside = x >= 0 && x < source.width && y >= 0 && y < source.height;
    return inside ? __ldg(pixel_at(source, x, y) + channel) : source.fill >> (8 * channel) & 255;
}

struct Range { int first, last; };

// The part of a source axis that outputs of a tile need. Tables are monotonic, upwards, or downwards if flipped.
__device__ Range source_of(const Table &table, int begin, int end) {
    return {min(table.first(begin), table.first(end)),
            max(table.first(begin) + table.count(begin), table.first(end) + table.count(end)) - 1};
}

struct Tile { int x, y, last_x, last_y; };  // of an output

// Four values of an output, which are next to each other in memory.
template <bool IS_PLANAR> struct Word {
    int row, place;  // in the tile; bytes of a row are in the order of the output

    __device__ Word(int index) : row(index / WORDS_PER_ROW), place(4 * (index % WORDS_PER_ROW)) {}
    __device__ int x(int i) const { return IS_PLANAR ? place % TILE_X + i : (place + i) / CHANNELS; }
    __device__ int channel(int i) const { return IS_PLANAR ? place / TILE_X : (place + i) % CHANNELS; }
};

// Adds the taps of one output at COUNT places. `level(tap, i, channel)` is of a source pixel.
template <int UNROLL, int COUNT, class Level>
__device__ void add_taps(const Table &table, int index, int count, Level level, int (&sums)[COUNT][CHANNELS]) {
#pragma unroll UNROLL
    for (int tap = 0; tap < count; ++tap) {
        const int weight = table.weight(index, tap);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int channel = 0; channel < CHANNELS; ++channel) sums[i][channel] += weight * level(tap, i, channel);
    }
}

template <int COUNT, int VALUES> __device__ void start(int (&sums)[COUNT][VALUES], int shift) {
#pragma unroll
    for (int i = 0; i < COUNT * VALUES; ++i) sums[i / VALUES][i % VALUES] = 1 << (shift - 1);  // a half
}

// The usual order: the horizontal pass leaves rows of the source, as wide as the tile, in shared memory.
template <bool IS_PLANAR> struct RowsFirst {
    static const bool IS_X_FIRST = true;

    __device__ static void first_pass(const Source &source, const Table &along_x, const Tile &tile, Range chunk,
                                      uchar *shared) {
        const int shift = along_x.shift();
        const int groups = (chunk.last - chunk.first) / ROWS_PER_THREAD + 1;
        for (int item = threadIdx.x; item < groups * TILE_X; item += THREADS) {
            const int x = item % TILE_X, column = tile.x + x, row = item / TILE_X * ROWS_PER_THREAD;
            if (column > tile.last_x) continue;
            int y[ROWS_PER_THREAD], sums[ROWS_PER_THREAD][CHANNELS];
            start(sums, shift);
#pragma unroll
            for (int i = 0; i < ROWS_PER_THREAD; ++i)
                y[i] = min(chunk.first + row + i, chunk.last);  // a group may reach below; nobody reads that
            const int first = along_x.first(column), count = along_x.count(column);
            if (holds(first, count, source.width) && y[0] >= 0 && y[ROWS_PER_THREAD - 1] < source.height) {
                const uchar *lines[ROWS_PER_THREAD];
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) lines[i] = pixel_at(source, first, y[i]);
                add_taps<2>(along_x, column, count, [&](int tap, int i, int channel) {
                    return __ldg(lines[i] + tap * CHANNELS + channel);
                }, sums);
            } else {
                add_taps<1>(along_x, column, count, [&](int tap, int i, int channel) {
                    return level_or_fill(source, first + tap, y[i], channel);
                }, sums);
            }
#pragma unroll
            for (int i = 0; i < ROWS_PER_THREAD; ++i)
#pragma unroll
                for (int channel = 0; channel < CHANNELS; ++channel)
                    shared[(row + i) * ROW_BYTES + (IS_PLANAR ? channel * TILE_X + x : x * CHANNELS + channel)] =
                        to_level(sums[i][channel], shift);
        }
    }

    __device__ static void second_pass(const Table &along_y, const Tile &tile, Word<IS_PLANAR> word, Range chunk,
                                       const uchar *shared, int (&sums)[4]) {
        const int y = tile.y + word.row, first = along_y.first(y);
        const int end = min(first + along_y.count(y), chunk.last + 1);
#pragma unroll 2
        for (int row = max(first, chunk.first); row < end; ++row) {
            const int weight = along_y.weight(y, row - first);
            const uint levels = *(const uint *)(shared + (row - chunk.first) * ROW_BYTES + word.place);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += weight * (int)(levels >> (8 * i) & 255);
        }
    }
};

// The other order: the vertical pass leaves columns of the source, as high as the tile, in shared memory.
template <bool IS_PLANAR> struct ColumnsFirst {
    static const bool IS_X_FIRST = false;

    __device__ static void first_pass(const Source &source, const Table &along_y, const Tile &tile, Range chunk,
                                      uchar *shared) {
        const int shift = along_y.shift();
        for (int item = threadIdx.x; item < (tile.last_y - tile.y + 1) * CHUNK; item += THREADS) {
            const int x = chunk.first + item % CHUNK, y = tile.y + item / CHUNK;
            if (x > chunk.last) continue;
            const int first = along_y.first(y), count = along_y.count(y);
            int sums[1][CHANNELS];
            start(sums, shift);
            if (x >= 0 && x < source.width && holds(first, count, source.height)) {
                const uchar *pixel = pixel_at(source, x, first);
                add_taps<2>(along_y, y, count, [&](int tap, int, int channel) {
                    return __ldg(pixel + (long long)tap * source.row_bytes + channel);
                }, sums);
            } else {
                add_taps<1>(along_y, y, count, [&](int tap, int, int channel) {
                    return level_or_fill(source, x, first + tap, channel);
                }, sums);
            }
#pragma unroll
            for (int channel = 0; channel < CHANNELS; ++channel)
                shared[item * CHANNELS + channel] = to_level(sums[0][channel], shift);
        }
    }

    __device__ static void second_pass(const Table &along_x, const Tile &tile, Word<IS_PLANAR> word, Range chunk,
                                       const uchar *shared, int (&sums)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int x = min(tile.x + word.x(i), tile.last_x);  // a word may reach beyond; nobody reads that
            const int first = along_x.first(x);
            const int end = min(first + along_x.count(x), chunk.last + 1);
            const uchar *row = shared + word.row * CHUNK * CHANNELS + word.channel(i);
#pragma unroll 1
            for (int column = max(first, chunk.first); column < end; ++column)
                sums[i] += along_x.weight(x, column - first) * row[(column - chunk.first) * CHANNELS];
        }
    }
};

// ------------------------------------------------------------------------------------------------------------ output

template <class T> struct alignas(4 * sizeof(T)) Four { T at[4]; };

template <class T> __device__ void store_four(T *at, const Four<T> &values, int valid) {
    if (valid >= 4 && (ullong)at % sizeof(Four<T>) == 0) {
        *(Four<T> *)at = values;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < valid) at[i] = values.at[i];
}

// a / b, correctly rounded, given 1 / b twice (Markstein's theorem): a third of the instructions of a division. Without
// the correction, a * reciprocal.
__device__ float quotient(float a, float b, float reciprocal, float correction) {
    const float estimate = a * reciprocal;
    return fmaf(fmaf(-b, estimate, a), correction, estimate);
}

// The numbers of a STORE, in shared memory. Threads read them after a barrier. ToTensor divides levels by 255 (1), v2's
// ToDtype multiplies by 1 / 255 (2).
struct Normalization {
    float unit, of_unit, correction, mean[3], std[3], of_std[3];

    __device__ void read(const Step &step) {
        const int channel = threadIdx.x;
        if (channel >= 3) return;
        unit = step.numbers[1] != 0 ? 255.0f : 1.0f, of_unit = 1.0f / unit;
        correction = step.numbers[1] == 2 ? 0.0f : of_unit;
        mean[channel] = (float)step.numbers[2 + channel], std[channel] = (float)step.numbers[5 + channel];
        of_std[channel] = 1.0f / std[channel];
    }

    __device__ float of_level(int level) const { return quotient((float)level, unit, of_unit, correction); }
    __device__ float of_value(float value, int c) const {
        return quotient(value - mean[c], std[c], of_std[c], of_std[c]);
    }
    __device__ float operator()(int level, int c) const { return of_value(of_level(level), c); }
};

#if OUTPUT_BITS == 8
typedef uchar Element;
__device__ Element element_of(float value) { return (Element)value; }
#elif OUTPUT_BITS == 32
typedef float Element;
__device__ Element element_of(float value) { return value; }
#else
typedef unsigned short Element;  // the bits
__device__ Element element_of(float value) {
#if BFLOAT
    const uint bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#elif defined(EMULATED)
    return float16_bits(value);
#else
    Element bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}
#endif

__device__ Element to_element(int level, int channel, const Normalization &by) {
    return OUTPUT_BITS == 8 ? (Element)level : element_of(by(level, channel));
}

// Where a resize leaves levels for the next job.
struct ToImage {
    typedef uchar Value;
    static const bool IS_PLANAR = false;
    __device__ static void prepare(const Step &, Normalization &) {}
    __device__ static Value value(int level, int, const Normalization &) { return level; }
};

struct ToOutput {
    typedef Element Value;
    static const bool IS_PLANAR = PLANAR;
    __device__ static void prepare(const Step &step, Normalization &by) { by.read(step); }
    __device__ static Value value(int level, int c, const Normalization &by) { return to_element(level, c, by); }
};

// Where an image, by default the output, has a value.
template <class T = Element, bool IS_PLANAR = PLANAR>
__device__ T *place(const Job &job, int x, int y, int c, int channels) {
    const size_t width = job.width;
    return (T *)job.target + (IS_PLANAR ? ((size_t)c * job.height + y) * width + x : channels * (y * width + x) + c);
}

template <class Target>
__device__ void write_word(const Job &job, const Tile &tile, Word<Target::IS_PLANAR> word,
                           int shift, const int (&sums)[4], const Normalization &by) {
    typedef typename Target::Value Value;
    Four<Value> values;
#pragma unroll
    for (int i = 0; i < 4; ++i) values.at[i] = Target::value(to_level(sums[i], shift), word.channel(i), by);
    const int y = tile.y + word.row, columns = tile.last_x - tile.x + 1, x = word.x(0);
    if (Target::IS_PLANAR)
        store_four(place<Value, true>(job, tile.x + x, y, word.channel(0), CHANNELS), values, columns - x);
    else
        store_four(place<Value, false>(job, tile.x, y, word.place, CHANNELS), values, columns * CHANNELS - word.place);
}

template <template <bool> class Order, class Target> __device__ void resample(const Batch &batch, int number) {
    typedef Order<Target::IS_PLANAR> Passes;
    __shared__ uint shared[SHARED_WORDS];
    __shared__ Normalization by;
    const Job &job = batch.jobs[number];
    const int tiles_x = (job.width + TILE_X - 1) / TILE_X;
    const int left = blockIdx.x % tiles_x * TILE_X, top = blockIdx.x / tiles_x * TILE_Y;
    if (top >= job.height) return;
    const Tile tile = {left, top, min(left + TILE_X, job.width) - 1, min(top + TILE_Y, job.height) - 1};
    const int fill = (int)batch.steps[job.first].numbers[12];
    const Source source = {job.source, job.source_height, job.source_width, CHANNELS * job.source_width, fill};
    const Table along_x = {batch.pool + job.table_x, job.width}, along_y = {batch.pool + job.table_y, job.height};
    const Table &one = Passes::IS_X_FIRST ? along_x : along_y, &other = Passes::IS_X_FIRST ? along_y : along_x;
    const Range needed = Passes::IS_X_FIRST ? source_of(along_y, tile.y, tile.last_y)
                                            : source_of(along_x, tile.x, tile.last_x);
    const int shift = other.shift();
    Target::prepare(batch.steps[job.first + 1], by);  // the barriers below are those of its result, too

    int sums[WORDS_PER_THREAD][4];
    start(sums, shift);
    for (int first = needed.first; first <= needed.last; first += CHUNK) {
        const Range chunk = {first, min(first + CHUNK - 1, needed.last)};
        Passes::first_pass(source, one, tile, chunk, (uchar *)shared);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WORDS_PER_THREAD; ++i) {
            const Word<Target::IS_PLANAR> word(threadIdx.x + i * THREADS);
            if (tile.y + word.row <= tile.last_y)
                Passes::second_pass(other, tile, word, chunk, (const uchar *)shared, sums[i]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const Word<Target::IS_PLANAR> word(threadIdx.x + i * THREADS);
        if (tile.y + word.row <= tile.last_y) write_word<Target>(job, tile, word, shift, sums[i], by);
    }
}

// Grid: (tiles of the largest result, jobs). Columns: three blocks at a time, as the compiler would take more registers
// than two blocks leave.
#define RESAMPLE(name, Order, Target, blocks) \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(Batch batch, int first) { \
        resample<Order, Target>(batch, first + blockIdx.y); \
    }
RESAMPLE(resample_rows, RowsFirst, ToImage, 4)
RESAMPLE(resample_rows_store, RowsFirst, ToOutput, 4)
RESAMPLE(resample_columns, ColumnsFirst, ToImage, 3)
RESAMPLE(resample_columns_store, ColumnsFirst, ToOutput, 3)

// From an image to the output. A thread has four pixels, which follow one another in the output, too.
extern "C" __global__ void __launch_bounds__(THREADS) store(Batch batch, int first) {
    __shared__ Normalization by;
    const Job job = batch.jobs[first + blockIdx.y];
    const Step &step = batch.steps[job.first];
    const int pixels = job.height * job.width;
    if (4 * THREADS * (int)blockIdx.x >= pixels) return;
    by.read(step);
    __syncthreads();
    const int at = 4 * (blockIdx.x * THREADS + threadIdx.x), count = min(4, pixels - at);
    if (count <= 0) return;
    Pixel quad[4];
    load_quad(job.source + 3 * (size_t)at, count, quad);
    const int channels = (int)step.numbers[0];
    Element values[12];
#pragma unroll
    for (int i = 0; i < 12; i++) {
        const Pixel p = quad[i / 3];
        values[i] = to_element(i % 3 == 0 ? p.r : i % 3 == 1 ? p.g : p.b, i % 3, by);
    }
#pragma unroll
    for (int c = 0; c < 3; c++) {
        if (!PLANAR && channels == 3) {
            const Element *v = values + 4 * c;
            store_four(place(job, at, 0, 4 * c, 3), Four<Element>{v[0], v[1], v[2], v[3]}, 3 * count - 4 * c);
        } else if (c < channels) {
            const Element *v = values + c;
            store_four(place(job, at, 0, c, channels), Four<Element>{v[0], v[3], v[6], v[9]}, count);
        }
    }
}

// A resize of floats to the output. Of the result, the output is what a crop and flips leave: pixel x is pixel
// n[12] + n[13] * x. A thread has one pixel.
extern "C" __global__ void __launch_bounds__(THREADS) store_resized(Batch batch, int first) {
    __shared__ Normalization by;
    const Job job = batch.jobs[first + blockIdx.y];
    const Step &step = batch.steps[job.first];
    const double *n = step.numbers;
    if ((int)(blockIdx.x * THREADS) >= job.height * job.width) return;
    by.read(step);
    __syncthreads();
    const int at = blockIdx.x * THREADS + threadIdx.x, channels = (int)n[0];
    if (at >= job.height * job.width) return;
    const int x = at % job.width, y = at / job.width;
    const FloatResize to = {(int)n[10], (int)n[11], n[8] == 3, n[9] != 0};
    const int from_x = (int)n[12] + (int)n[13] * x, from_y = (int)n[14] + (int)n[15] * y;
    Colour mean = {0, 0, 0};  // outside
    if (from_x >= 0 && from_x < to.width && from_y >= 0 && from_y < to.height)
        mean = to.at(job, from_x, from_y, [&](int level) { return by.of_level(level); });
    const float values[3] = {mean.r, mean.g, mean.b};
    for (int c = 0; c < channels; c++) *place(job, x, y, c, channels) = element_of(by.of_value(values[c], c));
}

// A box of an output that was stored before. A thread has one pixel. Grid: (parts of the largest image, jobs).
extern "C" __global__ void erase_output(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const Step &step = batch.steps[job.first];
    const double *n = step.numbers;
    const int width = (int)n[2], at = blockIdx.x * blockDim.x + threadIdx.x, channels = (int)n[8];
    if (at >= width * (int)n[3]) return;
    for (int c = 0; c < channels; c++) {
        const float value = n[4] != 0 ? batch.extras[step.extra + channels * at + c] : (float)n[5 + c];
        *place(job, (int)n[0] + at % width, (int)n[1] + at / width, c, channels) = element_of(value);
    }
}
