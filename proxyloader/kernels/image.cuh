// What both modules share. The host puts `enum Opcode`, made from programs.OPCODES, before this text, and colour.cu or
// resize.cu behind it. The structs are those of programs.py.
//
// Compile with --fmad=false (g++: -ffp-contract=off). Pillow's wheels for x86-64 round each product before they add;
// with fused multiply-add some levels would differ by one. Where torch fuses, these sources call fmaf.

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned long long ullong;

struct Step {
    int code, extra;
    int run, table;  // number of steps of the run from level to level that starts here, and its table
    double numbers[16];
};

struct Job {
    const uchar *source;
    uchar *target;
    long long table_x, table_y;  // of a resize: where its weights are in the pool
    int source_height, source_width, height, width;
    int first, count;  // steps
    int stats;         // only valid if the first step needs statistics
    int source_base, target_base;  // used by the host alone
};

struct Run { int first, count, job, table; };
struct Stats { ullong grey_sum; uint counts[3][256]; };

struct Batch {
    const Job *jobs;
    const Step *steps;
    const Run *runs;
    const float *extras;
    Stats *stats;   // zeros at the start
    uchar *tables;  // 3 x 256 for each run
    int *pool;      // weights of resizes
    const uchar *scratch;  // where the results of jobs are
};

static_assert(sizeof(Step) == 144 && sizeof(Job) == 72 && sizeof(Run) == 16 && sizeof(Stats) == 3080, "programs.py");
struct Pixel { int r, g, b; };

__device__ Pixel pixel_of(const uchar *levels) { return {levels[0], levels[1], levels[2]}; }

__device__ Pixel pixel_at(const Job &job, int x, int y) {
    return pixel_of(job.source + 3 * ((size_t)y * job.source_width + x));
}

// Four neighbours are three words, if the first starts at a multiple of four bytes.
__device__ void load_quad(const uchar *from, int count, Pixel quad[4]) {
    if (count == 4 && ((size_t)from & 3) == 0) {
        const uint *words = (const uint *)from;
        const uint a = words[0], b = words[1], c = words[2];
        quad[0] = {(int)(a & 255), (int)(a >> 8 & 255), (int)(a >> 16 & 255)};
        quad[1] = {(int)(a >> 24), (int)(b & 255), (int)(b >> 8 & 255)};
        quad[2] = {(int)(b >> 16 & 255), (int)(b >> 24), (int)(c & 255)};
        quad[3] = {(int)(c >> 8 & 255), (int)(c >> 16 & 255), (int)(c >> 24)};
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        quad[i] = {0, 0, 0};
        if (i < count) quad[i] = pixel_of(from + 3 * i);
    }
}

__device__ int clip_to(int v, int high) { return v < 0 ? 0 : v > high ? high : v; }

// --- resizes of float tensors ----------------------------------------------------------------------------------------

// Bicubic with a = -0.5, fused as GCC fuses it.
__device__ float tensor_cubic(float x) {
    const float a = -0.5f;
    if (x < 1.0f) return fmaf(fmaf(a + 2.0f, x, -(a + 3.0f)) * x, x, 1.0f);
    return x < 2.0f ? fmaf(fmaf(fmaf(a, x, -5.0f * a), x, 8.0f * a), x, -4.0f * a) : 0.0f;
}

// The weights of torch's interpolate with antialias of floats, for one index of one axis.
struct FloatTaps {
    int first, count;
    bool is_cubic, is_all_fused;
    float center, inverse_scale, sum;

    __device__ FloatTaps(int index, int from, int to, bool is_cubic, bool is_all_fused)
        : is_cubic(is_cubic), is_all_fused(is_all_fused), sum(0.0f) {
        const float scale = (float)from / (float)to, support = (is_cubic ? 2.0f : 1.0f) * fmaxf(scale, 1.0f);
        center = scale * (index + 0.5f);
        inverse_scale = scale >= 1.0f ? 1.0f / scale : 1.0f;
        first = max((int)((double)(center - support) + 0.5), 0);
        count = min((int)((double)(center + support) + 0.5), from) - first;
        for (int tap = 0; tap < count; tap++) sum += filter_at(tap);
    }

    __device__ float filter_at(int tap) const {
        const float x = fabsf((float)(((double)((float)(tap + first) - center) + 0.5) * inverse_scale));
        return is_cubic ? tensor_cubic(x) : fmaxf(1.0f - x, 0.0f);
    }

    __device__ float weight(int tap) const { return filter_at(tap) / sum; }

    // Unless torch's build fuses all products with their sums, GCC has vectorised its loop behind the first product: of
    // each four products, none is fused.
    __device__ bool is_fused(int tap) const { return is_all_fused || tap > (count - 1) / 4 * 4; }
};

struct Colour { float r, g, b; };

__device__ float summed(float sum, float weight, float v, bool is_fused) {
    return is_fused ? fmaf(weight, v, sum) : sum + weight * v;
}

template <class Value> __device__ Colour tensor_mean(const FloatTaps &taps, Value value) {
    Colour sum = {0, 0, 0};  // the first product has nothing to be added to
    for (int tap = 0; tap < taps.count; tap++) {
        const float w = taps.weight(tap);
        const bool is_fused = taps.is_fused(tap);
        const Colour v = value(tap);
        sum = {summed(sum.r, w, v.r, is_fused), summed(sum.g, w, v.g, is_fused), summed(sum.b, w, v.b, is_fused)};
    }
    return sum;
}

// interpolate with antialias of a tensor of floats, in the sums that torch computes in one thread.
struct FloatResize {
    int height, width;
    bool is_cubic, is_all_fused;  // whether torch fuses all products

    // `value(level)` is a source value.
    template <class Value> __device__ Colour at(const Job &job, int x, int y, Value value) const {
        const auto source = [&](int column, int row) {
            const Pixel p = pixel_at(job, column, row);
            return Colour{value(p.r), value(p.g), value(p.b)};
        };
        const FloatTaps across(x, job.source_width, width, is_cubic, is_all_fused);
        const FloatTaps down(y, job.source_height, height, is_cubic, is_all_fused);
        return tensor_mean(down, [&](int row) {
            return tensor_mean(across, [&](int column) { return source(across.first + column, down.first + row); });
        });
    }
};
